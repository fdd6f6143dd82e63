"""What the program asks of the world besides the network: the time, and chance.

For `daemon`, `net` and `train`. Begin with `now`. Whoever runs a daemon in a world of its own
gives its task another clock before it begins; all that it begins inherits it.
"""
