"""Links between peers, measured or not: where peers are, and what follows for the way between two.

For the cost model and whoever asks what a link is worth. Begin with `swarm_links`.
"""
