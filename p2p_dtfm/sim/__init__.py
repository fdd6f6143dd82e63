"""Virtual time: scenarios, the step-time simulator, and core's own state machines under faults.

Imports `core` only; `cli` and `testbed` use it, and the daemon finds run specs through it. Begin
with `scenario.scenario` and `step_time.simulator`, or with `faults.agreement_seeds`.
"""
