"""Which views a peer knows by itself or by proof, and which of two counts where they meet.

Pure data and functions of it, for the machines of `core.consensus`. Begin with `known_views`.
"""
