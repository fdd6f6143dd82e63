"""What engine, planner and simulators must do alike: the order of a stage's tasklets, the samples
of a microbatch, the pieces in which a segment is reduced, and who sums how much of it.

Imports `protocol` only. Begin with `tasklets` and `shard_weights`.
"""
