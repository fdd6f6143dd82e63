"""Compares what daemons tell their users with the truth about the world.

`told` asks each daemon in turn, and knows for how long each falsehood has lasted. `world` is the
truth. The others each compare one kind of what is told. `states` is about where a daemon says that
it stands, and `whom` about whom it waits for. `figures` and `wrong` compare figures, and what a
daemon says is wrong.

All of it looks, and changes nothing: a seed has the same trace with it as without.
"""
