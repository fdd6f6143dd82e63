"""One peer's part of one step: microbatches through its stage, and the reduction.

Beside `state_transfer`; imports `telemetry` and below. Begin with `step_engine`; `pipeline` and
`reduction` are the two halves of what it does.
"""
