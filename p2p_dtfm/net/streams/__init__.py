"""Bytes in bulk: frames over lanes, blobs by their hash, and the probing of links.

Imports `libp2p`; for the daemon. Begin with `bulk` and `frames`.
"""
