"""One stage of a pipeline at work: microbatches forward and backward, and sums with others' parts.

Begin with `stage_runner`.
"""
