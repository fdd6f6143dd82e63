"""Whether a machine has the memory for any part of a run, before it tries."""

from p2p_dtfm.core.planner.feasibility import gibibytes
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, workload_of

_COPIES_WHILE_MEASURED = 2
"""Parameters and their gradients."""


def require_room(spec: RunSpec, free_bytes: int) -> None:
    """Raises `UserError` where no block fits, or where the largest layer cannot even be timed.

    A run spec may come from a stranger, and ask for more than any machine has.
    """
    workload = workload_of(spec)
    block = workload.block.state_bytes + workload.block.saved_bytes
    costs = [workload.embedding, workload.block, workload.head]
    if workload.unlike is not None:
        costs = list(workload.unlike.costs)
        block = min(cost.state_bytes + cost.saved_bytes for cost in costs)
    timed = _COPIES_WHILE_MEASURED * FLOAT_BYTES * max(cost.parameter_count for cost in costs)
    if spec.trains_adapters:  # the rest is frozen: it has no gradients
        timed = max(cost.state_bytes for cost in costs)
    needed, what = max((block, "a layer with one microbatch"), (timed, "timing its largest layer"))
    if needed > free_bytes:
        raise too_large(spec, what, gibibytes(needed), free_bytes)


def too_large(spec: RunSpec, what: str, takes: str, free_bytes: int) -> UserError:
    """`what` of the run `takes` more than there is."""
    return UserError(
        f"the run {spec.name} is too large for this machine: {what} takes {takes}, "
        f"and {gibibytes(free_bytes)} of memory are free",
        (
            "take part with a machine that has more memory, or close other programs",
            "whoever founds the run: a smaller width, vocabulary, context or microbatch in the "
            "run spec",
        ),
    )
