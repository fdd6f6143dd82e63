"""Who a peer is and where: identities, addresses, ports, and whom to call first.

For the rooms of `net` above it, and for the daemon. Begin with `identity` and `addresses`.
"""
