"""What the program asks of the world besides the network: time, chance, what is rare, disk, what
this process was granted of its machine, and where it was installed; and how Ctrl-C ends it as it
loads.

Begin with `now`. Whoever runs a daemon in a world of its own
gives its task another clock or disk before it begins; all that it begins inherits it.
"""
