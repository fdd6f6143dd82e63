"""Events and directed links in virtual nanoseconds, and how holders exchange gradients over them.

Imports `schedule` and `units` at most. Begin with `virtual_network`.
"""
