"""Links between peers, measured or not: where peers are, and what that says of the way between two.

Begin with `swarm_links`.
"""
