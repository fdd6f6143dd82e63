"""Swarms of real daemons on one machine, faults done to them, and verdicts. No volunteer runs it.

It is above `daemon`. Begin with `local_swarm`. `virtual` runs daemons in one process and in virtual
time.
"""
