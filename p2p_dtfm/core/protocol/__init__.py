"""What peers store, sign and agree on, and the bytes of it: equal values give equal bytes anywhere.

May be imported by everybody; imports nothing of ours. Begin with `records`, `snapshot` and `plan`.
"""
