"""Seeds of faults, played on real daemons in virtual time. Begin with `__main__`.

schedules   what is drawn from a seed
deeds       how it is done
surroundings  what is other in some, for as long as they are played
watching    what is looked at meanwhile
told        whether what daemons tell their users is so
judge       what must hold
verdict     what must hold besides, where some lie
run         what is trained
playing     what is done when, and what must be meanwhile
one_seed    one from its beginning to its end, and what came of it
shrink      the fewest faults with which it still fails
"""
