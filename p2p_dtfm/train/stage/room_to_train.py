"""Whether a machine has the memory for any part of a run, before it tries."""

from p2p_dtfm.core.cost_model.tables.stage_memory import stage_memory
from p2p_dtfm.core.planner.feasibility import gibibytes
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.records import PROCESSOR
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, workload_of

_COPIES_WHILE_MEASURED = 2
"""Copies of a layer while it is measured: parameters and their gradients."""


def require_room(spec: RunSpec, free_bytes: int, kind: str = PROCESSOR) -> None:
    """Raises `UserError` if no block fits, or if the largest layer cannot even be timed.

    A run spec may come from a stranger, and ask for more than any machine has. `kind`: the kind of
    device whose memory it is.
    """
    workload = workload_of(spec)
    sizes = stage_memory(workload).of(kind, 1).layers
    block = min(layer.needed_bytes for layer in sizes.unlike or (sizes.block,))
    costs = [workload.embedding, workload.block, workload.head]
    if workload.unlike is not None:
        costs = list(workload.unlike.costs)
    timed = _COPIES_WHILE_MEASURED * FLOAT_BYTES * max(cost.parameter_count for cost in costs)
    if spec.trains_adapters:  # the rest is frozen: it has no gradients
        timed = max(cost.state_bytes for cost in costs)
    needed, what = max((block, "a layer with one microbatch"), (timed, "timing its largest layer"))
    if needed > free_bytes:
        raise too_large(spec, what, gibibytes(needed), free_bytes)


def too_large(spec: RunSpec, what: str, takes: str, free_bytes: int) -> UserError:
    """A fault: `what` of the run `takes` more memory than there is."""
    return UserError(
        f"the run {spec.name} is too large for this machine: {what} takes {takes}, "
        f"and {gibibytes(free_bytes)} of memory are free",
        (
            "take part with a machine that has more memory, or close other programs",
            "whoever founds the run: a smaller width, vocabulary, context or microbatch in the "
            "run spec",
        ),
    )
