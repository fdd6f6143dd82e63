"""Bytes in bulk: frames over lanes, blobs by their hash, and the probing of links.

Imports `libp2p`. Begin with `bulk` and `frames`.
"""
