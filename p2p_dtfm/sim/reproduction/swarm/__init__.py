"""Any scenario's own page: the paper's charts for whoever has other machines.

Imports its neighbours in `reproduction`; for `cli`. Begin with `swarm_bars`.
"""
