"""Attacks on real daemons; see `__main__`."""
