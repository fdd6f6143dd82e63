"""Core's state machines with seeded faults in virtual time, and what must hold at every moment.

Imports `core` only. Begin with `agreement_seeds` (`python -m p2p_dtfm.sim.faults.agreement_seeds`).
"""
