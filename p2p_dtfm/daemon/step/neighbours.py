"""Whom a stage exchanges boundary tensors with: in its own pipeline, and in those where it stands
in."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from p2p_dtfm.core.audit.boundaries import Due, beside, held_out_through
from p2p_dtfm.core.protocol.plan import Plan, Stage
from p2p_dtfm.core.protocol.run_spec import RunSpec


class Neighbours(NamedTuple):
    """The stages around one of a peer's places, and the held-out microbatches of that pipeline."""

    stages: Mapping[int, Stage]
    """The stages of the pipeline, by their positions."""
    position: int
    held_out: range

    @property
    def before(self) -> Stage | None:
        return self.stages.get(self.position - 1)

    @property
    def after(self) -> Stage | None:
        return self.stages.get(self.position + 1)

    def beside(self, after: bool) -> Stage:
        """A neighbour that must be there: an end of a pipeline exchanges nothing outward."""
        return self.stages[self.position + 1 if after else self.position - 1]


def neighbours_of(plan: Plan, me: str, spec: RunSpec) -> tuple[Neighbours, ...]:
    """One for each of `Plan.places_of`."""
    found = []
    for number, position in plan.places_of(me):
        stages = dict(enumerate(plan.pipelines[number].stages))
        held_out = held_out_indices(plan, spec, number)
        found.append(Neighbours(stages, position, held_out))
    return tuple(found)


def held_out_judged(plan: Plan, peer_id: str, spec: RunSpec, due: Due) -> list[int]:
    """The held-out microbatches that are part of a stage's work in a step that evaluates, in its
    order. These are all that go through it, or none where it has neighbours and claims nothing of
    them."""
    if beside(plan, peer_id) and not due.held_out:
        return []
    return held_out_of(neighbours_of(plan, peer_id, spec))


def held_out_of(places: Sequence[Neighbours]) -> list[int]:
    """The held-out microbatches that go through a stage, in its order."""
    return sorted(number for place in places for number in place.held_out)


def held_out_indices(plan: Plan, spec: RunSpec, pipeline: int) -> range:
    """The held-out microbatches of a pipeline, numbered after the training microbatches.

    They go round the pipelines in turn.
    """
    first, count = spec.microbatches_per_step, spec.evaluation_microbatches
    return held_out_through(plan, pipeline, first, count)
