"""What is shown of a daemon: one typed state, made by watching. Nothing of it reaches training.

Imports `telemetry` and below. Begin with `observer`.
"""
