"""Peers behind routers: whether others can call this one, relays, and direct connections.

Imports `libp2p`. Begin with `dial_back` and decision 14.
"""
