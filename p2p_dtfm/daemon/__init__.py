"""The interpreter: actions of core become calls on net and train, and their results events.

Its rooms, from the ground up; each imports only those below it: `machine`, `peers`, `telemetry`;
`dashboard`, `step` and `state_transfer` side by side; `trainer`, `node`. Begin with `node.daemon`.
"""
