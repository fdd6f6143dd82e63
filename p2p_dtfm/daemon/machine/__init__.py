"""This computer: its home directory, settings and limits, and the threads that compute.

For all rooms of the daemon, and for `cli`; imports none of them. Begin with `settings` and `home`.
"""
