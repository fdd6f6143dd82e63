"""Bugs that are put into the daemon on purpose, to see that seeds find them. Begin with `__main__`.

bug             what one is, and how it is put in
waiting         who is not woken, not asked, or never ends
states          gradients and states that are wrong, lost or doubled
disks           what is written, and read again
lives           who comes and goes, and what it owes the others meanwhile
verdicts        who is believed, and whose work is looked at: with seeds in which some lie
sleepers        what a machine that has slept makes of that
"""
