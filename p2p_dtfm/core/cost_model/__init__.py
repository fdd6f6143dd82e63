"""Predicted nanoseconds of a step, in integers, so that all peers predict alike.

For `planner`, `recovery` (which asks what a repeated step costs) and `sim`. Begin with
`placement_problem` (a snapshot as tables) and `costs` (a placement's step).
"""
