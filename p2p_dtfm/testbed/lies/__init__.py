"""Swarms of real daemons of which some lie about their work, and what comes of it.

For `cli` and tests. `daemon` is the program with a lie in it; `played` plays a swarm and judges it.
"""
