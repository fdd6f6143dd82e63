"""Events and directed links in virtual nanoseconds, and how holders exchange gradients over them.

For `cost_model` and the simulators of `sim`; imports `schedule` and `units` at most. Begin with
`virtual_network`.
"""
