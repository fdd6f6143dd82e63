"""States of layers on their way in and out while training goes on, and checkpoints.

Beside `step`; imports `telemetry` and below. Begin with `donor` and `following`, its other end;
`checkpoints` are of the whole swarm.
"""
