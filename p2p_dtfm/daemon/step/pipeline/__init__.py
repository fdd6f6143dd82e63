"""Microbatches on their way through one stage of a pipeline.

Begin with `microbatches`; `stage_boundary` is where they come from and go to, `open_step_work` what
is kept of them until the step commits.
"""
