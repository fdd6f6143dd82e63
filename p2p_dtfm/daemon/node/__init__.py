"""A daemon's life: founding, joining, the agreement's actions, what arrives, and the end.

The top of the daemon. Begin with `daemon`; `resident` stays when it pauses.
"""
