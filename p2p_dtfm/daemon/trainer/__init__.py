"""From view to view and from step to step: this peer's place, its loop, its commits.

Imports `step` and `state_transfer`. Begin with `trainer`.
"""
