"""What the program asks of the world besides the network: time, chance, what is rare, disk, what
this process was granted of its machine, and where it was installed; and how Ctrl-C ends it as it
loads.

Begin with `now`. To run a daemon in a world of its own, give its task another clock or disk before
the task begins. All tasks that it begins inherit them.
"""
