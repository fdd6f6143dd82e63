"""One attempt at a view: what is gathered in it, and what follows from that.

Pure data and functions of it, for the machines of `core.consensus`. Begin with `attempt`.
"""
