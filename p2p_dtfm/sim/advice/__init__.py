"""Which settings of a run suit a swarm: other batches, inner steps and codecs, planned one by one.

Imports `scenario`. Begin with `sweep.advise`.
"""
