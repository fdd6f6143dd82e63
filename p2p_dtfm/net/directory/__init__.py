"""How peers of a run meet: a DHT that everybody may write to, and few believe.

Imports `libp2p`. Begin with `directory`.
"""
