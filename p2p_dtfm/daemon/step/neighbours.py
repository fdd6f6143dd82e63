"""Whom a stage exchanges boundary tensors with: in its own pipeline, and where it stands in."""

from typing import NamedTuple

from p2p_dtfm.core.protocol.plan import Plan, Stage
from p2p_dtfm.core.protocol.run_spec import RunSpec


class Neighbours(NamedTuple):
    """The stages beside one of a peer's places, and the held-out microbatches of that pipeline."""

    before: Stage | None
    after: Stage | None
    held_out: range


def neighbours_of(plan: Plan, me: str, spec: RunSpec) -> tuple[Neighbours, ...]:
    """One for each of `Plan.places_of`."""
    found = []
    for number, position in plan.places_of(me):
        around = (None, *plan.pipelines[number].stages, None)
        held_out = held_out_indices(plan, spec, number)
        found.append(Neighbours(around[position], around[position + 2], held_out))
    return tuple(found)


def held_out_indices(plan: Plan, spec: RunSpec, pipeline: int) -> range:
    """The held-out microbatches of a pipeline, numbered after the training microbatches.

    They go round the pipelines in turn.
    """
    first = spec.microbatches_per_step
    end = first + spec.evaluation_microbatches
    return range(first + pipeline, end, len(plan.pipelines))
