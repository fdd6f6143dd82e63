"""The tasklets of a stage, and which one comes next: 1F1B, for engine, planner and simulator alike.

A stage takes turns: after a backward a forward comes first, after a forward a backward. If one
cannot run, the other goes. (1F1B is often told with backwards always first. Then a stage to which
many return at once starves those after it of forwards: simulated pipelines of like stages took 2 to
8% longer, or needed twice as many microbatches in flight.) A stage that splits its backwards (Qi et
al. 2023) leaves the gradients of matrices for when nothing else can run: while it waits, or while
it holds all that it may.
"""

from enum import StrEnum
from typing import NamedTuple


class TaskletKind(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    """At a stage that splits its backwards, the input's gradient alone."""
    WEIGHT = "weight"
    """The rest of a backward, at a stage that splits its backwards."""


FORWARD, BACKWARD, WEIGHT = TaskletKind


class Tasklet(NamedTuple):
    kind: TaskletKind
    microbatch: int


def next_tasklet(
    forward: bool, backward: bool, weight: bool, backward_was_last: bool
) -> TaskletKind | None:
    """The tasklet to run next among those that can run now; None where none can. Weights do not
    count for `backward_was_last`."""
    if forward and (backward_was_last or not backward):
        return FORWARD
    if backward:
        return BACKWARD
    return WEIGHT if weight else None


def weight_part_ns(forward_ns: int, backward_ns: int) -> int:
    """Time of the matrices' own gradients within a backward, as planner, simulator and emulated
    devices estimate it.

    They take as many operations as the forward's products (Qi et al. 2023, section 2), and the
    input's gradient takes at least as many.
    """
    return min(forward_ns, backward_ns // 2)
