"""Which peers a peer tells in a swarm of many: a grid of bounded degree in place of all to all.

Pure functions of what all members know alike. Begin with `grid`.
"""
