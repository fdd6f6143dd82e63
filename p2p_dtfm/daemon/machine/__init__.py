"""This computer: its home directory, settings and limits, and the threads that compute.

Imports no other room of the daemon. Begin with `settings` and `home`.
"""
