"""One stage of a pipeline at work: microbatches forward and backward, and sums with others' parts.

Imports `model`, `codecs` and `data`; for the daemon. Begin with `stage_runner`.
"""
