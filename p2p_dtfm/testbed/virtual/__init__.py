"""Real daemons in virtual time: one process, no waiting, and everything follows from a seed.

Tests use it. By hand, `python -m p2p_dtfm.testbed.virtual.seeds` plays faults. Begin with `swarm`.

loop       an event loop with virtual time, which also does jobs, signals and sockets
process    one daemon's process: it can be killed, be paused, and sleep
wires      network and directory, in the place of libp2p and the DHT
disk       a disk that may be slow or full, or lie
routers    machines behind routers, which nobody can call
worlds     what a daemon takes from its swarm
listening  hears what the daemons log
"""
