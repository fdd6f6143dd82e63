"""Other people's machines: the paper's charts for any scenario, and rows that others have measured.

Imports the rooms below `reproduction` and single files of it. Begin with `swarm_bars`.
"""
