"""Seeds of faults, played on real daemons in virtual time. Begin with `__main__`.

schedules   what is drawn from a seed
deeds       how a fault is done
surroundings  what differs around the daemons in some seeds
watching    what is looked at while a seed is played
told        whether what daemons tell their users is true
judge       what must hold
verdict     what must hold besides, where some lie
run         the run that is trained
playing     what is done when, and what must hold meanwhile
one_seed    a seed from its beginning to its end, and what came of it
shrink      the fewest faults with which a seed still fails
"""
