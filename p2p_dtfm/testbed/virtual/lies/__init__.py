"""Daemons in virtual time that lie, and what may come of it. For `seeds` and tests.

lying    who lies now, and what was told and committed
notes    what honest peers commit and deny meanwhile
words    lies that colluders tell together
putting  puts lies of real daemons (`testbed.lies`), and these, into the daemon's functions
"""
