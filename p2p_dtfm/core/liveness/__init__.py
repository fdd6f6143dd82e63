"""Who can be reached, who waits for whom, and who holds all others up.

For the daemon and `consensus`; judges, and does nothing. Begin with `liveness`.
"""
