"""Views, and what outlives one: steps under way, states, and what rolls them forward or repeats
them.

It does not know the planner. Begin with `view` and `restart_point`.
"""
