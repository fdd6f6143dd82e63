"""Who a peer is and where: identities, addresses, ports, and whom to call first.

Begin with `identity` and `addresses`.
"""
