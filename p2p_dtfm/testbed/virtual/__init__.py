"""Real daemons in virtual time: one process, no waiting, and everything follows from a seed.

For tests, and by hand: begin with `swarm`; `python -m p2p_dtfm.testbed.virtual.seeds` plays faults.
Beneath: `loop` (time, threads, signals and sockets are an event loop's), `process` (what can be
killed, paused, and sleep), `wires` (in the place of libp2p and the DHT), `disk` (slow, full, or one
that lies), `routers` (before machines that nobody can call), `worlds` (what a daemon takes from a
swarm), `listening` (to what they log).
"""
