"""What of a failed step is kept in the view that repeats it, and who computes the rest.

A pure function of the plan of that view and of what its contributors say they have computed, so
every member knows of each stage what it keeps. `docs/decisions/0013-partial-redo.md` says why it
is right.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from p2p_dtfm.core.agreement_messages import Contribution
from p2p_dtfm.core.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.recovery import Target
from p2p_dtfm.core.stage_progress import StageProgress, as_runs, from_runs


class StageRedo(NamedTuple):
    """One stage's part in a step: all of it, or what is left of a step that failed.

    A boundary tensor is sent exactly where the other side has not kept what came of it: the
    activation of the microbatch in place `n` if `n >= next_forwards`, the gradient if
    `n >= previous_backwards`. What this stage has kept it sends again.
    """

    microbatches: tuple[int, ...]
    """The pipeline's, in the order in which every stage computes them."""
    forwards: int = 0
    """So many, from the first on, are kept at this stage with what their forward made."""
    backwards: int = 0
    """So many of those with their backward: their gradients are in this stage's buffers."""
    next_forwards: int = 0
    """Kept at the next stage."""
    previous_backwards: int = 0
    """Kept at the stage before."""


class Kept(NamedTuple):
    """Of a stage: the first `forwards` and `backwards` of its pipeline's microbatches."""

    forwards: int
    backwards: int


NOTHING = Kept(0, 0)


@dataclass(frozen=True)
class PipelineRedo:
    microbatches: tuple[int, ...]
    kept: tuple[Kept, ...]
    """By stage."""


@dataclass(frozen=True)
class Redo:
    """How `step` goes on. Counts are of forwards of one microbatch through one stage."""

    step: int
    pipelines: tuple[PipelineRedo, ...]
    kept_forwards: int
    redone_forwards: int
    """At least so many are computed a second time: a stage that is gone has told nobody what it
    had done, but its neighbours had it from there."""

    def stage(self, plan: Plan, peer_id: str) -> StageRedo | None:
        """None for a peer without a stage."""
        place = plan.place_of(peer_id)
        if place is None:
            return None
        pipeline, position = self.pipelines[place[0]], place[1]
        kept = (NOTHING, *pipeline.kept, NOTHING)
        before, mine, after = kept[position : position + 3]
        return StageRedo(
            pipeline.microbatches, mine.forwards, mine.backwards, after.forwards, before.backwards
        )

    def progress(self, plan: Plan, peer_id: str) -> StageProgress | None:
        """What a peer may say from now on that it has computed."""
        redo, layers = self.stage(plan, peer_id), plan.layers_of(peer_id)
        if redo is None or not redo.forwards:
            return None
        runs = as_runs(redo.microbatches[: redo.forwards])
        return StageProgress(layers.start, layers.stop, runs, redo.backwards)


class _Done(NamedTuple):
    """`StageProgress`, unpacked."""

    layers: range
    forwarded: tuple[int, ...]
    backwards: int


def redo_of(plan: Plan, target: Target, contributions: Iterable[Contribution]) -> Redo | None:
    """None where nobody has begun the step that starts from `target`: then all of it is to do."""
    total = sum(pipeline.microbatch_count for pipeline in plan.pipelines)
    done = {part.member.peer_id: _done(part, target, total) for part in contributions}
    known = {peer_id: item for peer_id, item in done.items() if item is not None}
    if not known:
        return None
    begun: list[tuple[int, ...]] = []
    for pipeline in plan.pipelines:
        taken = {number for numbers in begun for number in numbers}
        begun.append(_begun(pipeline, known, taken))
    redone = [
        PipelineRedo(
            (*first, *rest),
            tuple(_kept(first, stage, known) for stage in pipeline.stages),
        )
        for pipeline, first, rest in zip(plan.pipelines, begun, _deal(plan, begun), strict=True)
    ]
    kept = sum(stage.forwards for pipeline in redone for stage in pipeline.kept)
    given_up = sum(len(item.forwarded) for item in known.values()) - kept
    lost = sum(_lost(pipeline.kept) for pipeline in redone)
    return Redo(target.step, tuple(redone), kept, given_up + lost)


def _done(part: Contribution, target: Target, total: int) -> _Done | None:
    """What a contributor has done of this very step; None if nothing, or nothing that can be."""
    pending = part.pending
    if pending is None or pending.progress is None:
        return None
    if (pending.step, pending.base) != (target.step, target.lineage):
        return None
    progress = pending.progress
    forwarded = from_runs(progress.forwarded, total)
    if not forwarded or not 0 <= progress.backwards <= len(forwarded):
        return None
    layers = range(progress.first_layer, progress.end_layer)
    if any(part.held.get(layer) != target.step for layer in layers):
        return None
    return _Done(layers, forwarded, progress.backwards)


def _begun(pipeline: Pipeline, done: Mapping[str, _Done], taken: set[int]) -> tuple[int, ...]:
    """The microbatches, in order, with which the stages of a pipeline keep most of their work.

    None of them may be another pipeline's: each counts once.
    """
    found = (
        done[stage.peer_id].forwarded
        for stage in pipeline.stages
        if stage.peer_id in done and done[stage.peer_id].layers == stage.layers
    )
    free: list[tuple[int, ...]] = []
    for numbers in sorted(found, key=len, reverse=True):  # a prefix is never worth more
        if taken.isdisjoint(numbers) and all(numbers != it[: len(numbers)] for it in free):
            free.append(numbers)

    def worth(numbers: tuple[int, ...]) -> int:
        kept = ((stage, _kept(numbers, stage, done)) for stage in pipeline.stages)
        return sum(len(stage.layers) * sum(item) for stage, item in kept)

    return max(free, key=worth, default=())


def _kept(begun: tuple[int, ...], stage: Stage, done: Mapping[str, _Done]) -> Kept:
    """What a stage keeps in a pipeline that goes on with `begun`: all, or its gradients would hold
    a microbatch that others compute too.

    The backward that it may have done unsaid is counted in.
    """
    mine = done.get(stage.peer_id)
    if mine is None or mine.layers != stage.layers:
        return NOTHING
    pairs = zip(begun, mine.forwarded, strict=False)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if alike < min(mine.backwards + 1, len(mine.forwarded)):
        return NOTHING
    return Kept(alike, mine.backwards)


def _lost(kept: Sequence[Kept]) -> int:
    """Forwards that stages without them must have done: later stages had their outputs, earlier
    ones the gradients that came back."""
    lost = 0
    for position, stage in enumerate(kept):
        later = max(item.forwards for item in kept[position:])
        earlier = max(item.backwards for item in kept[: position + 1])
        lost += max(later, earlier) - stage.forwards
    return lost


def _deal(plan: Plan, begun: Sequence[Sequence[int]]) -> list[list[int]]:
    """The microbatches that nobody goes on with, to each pipeline: up to its planned count."""
    taken = {number for numbers in begun for number in numbers}
    total = sum(pipeline.microbatch_count for pipeline in plan.pipelines)
    free = [number for number in range(total) if number not in taken]
    pairs = zip(plan.pipelines, begun, strict=True)
    quotas = [max(0, pipeline.microbatch_count - len(numbers)) for pipeline, numbers in pairs]
    while sum(quotas) > len(free):  # some pipeline has begun more than is planned for it now
        largest = max(range(len(quotas)), key=lambda number: (quotas[number], number))
        quotas[largest] -= 1
    ends = [sum(quotas[: number + 1]) for number in range(len(quotas))]
    return [free[end - quota : end] for end, quota in zip(ends, quotas, strict=True)]
