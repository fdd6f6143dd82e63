"""Bugs that are put into the daemon on purpose, to see that seeds find them. Begin with `__main__`.

bug             what a planted bug is, and how it is put in
waiting         peers that are not woken or not asked, and tasks that never end
states          gradients and states that are wrong, lost or doubled
disks           what is written, and read again
lives           peers that come and go, and what they owe the others meanwhile
verdicts        who is believed, and whose work is audited: with seeds in which some lie
sleepers        what a machine makes of its sleep
"""
