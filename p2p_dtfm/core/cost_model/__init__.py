"""Predicted nanoseconds of a step, in integers, so that all peers predict alike.

Begin with `placement_problem` (a snapshot as tables) and `costs` (a placement's step).
"""
