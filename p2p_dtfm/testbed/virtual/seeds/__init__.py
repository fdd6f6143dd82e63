"""Seeds of faults, played on real daemons in virtual time. Begin with `__main__`.

schedules   what is drawn from a seed
deeds       how it is done
watching    what is looked at meanwhile
judge       what must hold
verdict     what must hold besides, where some lie
run         what is trained
playing     one seed from its beginning to its end
shrink      the fewest faults with which it still fails
"""
