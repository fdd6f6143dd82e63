"""Links between peers, measured or not: where peers are, and what follows for the way between two.

Begin with `swarm_links`.
"""
