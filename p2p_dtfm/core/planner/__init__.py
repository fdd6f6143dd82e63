"""From a snapshot to a plan, and what follows from one.

For `sim`, `daemon` and `cli`; `consensus` is handed its result and does not import it. Begin with
`planner.compute_plan`; `search` and `moves` look for placements, `stability` decides whether a
better plan is worth a move, `explain` says why.
"""
