"""DT-FM's own cost and placements, to reproduce the paper and compare. Peers never agree on them.

Imports `core` and `scenario`. Begin with `cost` and `solver`.
"""
