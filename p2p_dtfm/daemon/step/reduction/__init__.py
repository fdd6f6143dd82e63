"""Gradients of a segment summed over those that hold it, while the last microbatches still compute.

Begin with `step_reduction`; `segment_exchange` has parts and sums take their courses, `tied_sums`
is for ends that share parameters.
"""
