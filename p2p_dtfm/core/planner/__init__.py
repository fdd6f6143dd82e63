"""From a snapshot to a plan, and what follows from one.

Begin with `planner.compute_plan`; `search` and `moves` look for placements, `stability` decides
whether a better plan is worth a move, `explain` says why. `consensus` is handed its result and does
not import it.
"""
