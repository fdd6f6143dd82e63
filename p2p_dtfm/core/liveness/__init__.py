"""Who can be reached, who waits for whom, and who holds all others up.

It judges, and does nothing. Begin with `liveness`.
"""
