"""What of a failed step is kept in the view that repeats it, and who computes the rest.

A pure function of the plan of that view and of what its contributors say they have computed, so
every member knows what each stage keeps. `docs/decisions/0013-partial-redo.md` says why it is
right.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.stage_progress import StageProgress, as_runs, from_runs
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.schedule.one_order import merged


class StageReplay(NamedTuple):
    """One stage's part in a step: all of it, or what is left of a step that failed.

    A stage sends a boundary tensor exactly where the neighbour has not kept what it made of it. If
    this stage has kept the tensor, it sends it again.
    """

    microbatches: tuple[int, ...]
    """In the order in which this stage computes them."""
    forwards: int = 0
    """For so many, from the first on, this stage keeps what their forward made."""
    backwards: int = 0
    """For so many of those, the backward is done: their gradients are in this stage's buffers."""
    next_has: frozenset[int] = frozenset()
    """The microbatches whose forward the next stage keeps."""
    previous_has: frozenset[int] = frozenset()
    """The microbatches whose backward the stage before keeps."""
    stood_in: tuple[frozenset[int], ...] = ()
    """The microbatches of each place in which this peer stands in (`Plan.places_of`); all others
    are of its own pipeline."""

    @property
    def next_may_have(self) -> frozenset[int]:
        """`next_has`, and in each place the microbatch after those. The next stage may have done
        one forward more than it could tell. It then sends that one's gradient before this stage has
        sent the activation again."""
        missing = [number for number in self.microbatches if number not in self.next_has]
        return self.next_has.union({self.place(n): n for n in reversed(missing)}.values())

    def place(self, number: int) -> int:
        """Which of the peer's places a microbatch goes through."""
        found = (n for n, numbers in enumerate(self.stood_in, start=1) if number in numbers)
        return next(found, 0)


class Kept(NamedTuple):
    """What a stage keeps in one pipeline: its first `forwards` forwards and `backwards` backwards,
    in the order of the pipeline's microbatches."""

    forwards: int
    backwards: int


NOTHING = Kept(0, 0)


@dataclass(frozen=True)
class PipelineReplay:
    microbatches: tuple[int, ...]
    kept: tuple[Kept, ...]
    """What each stage keeps, in pipeline order."""


@dataclass(frozen=True)
class PartialReplay:
    """How `step` goes on. Each count is in forwards of one microbatch through one stage."""

    step: int
    pipelines: tuple[PipelineReplay, ...]
    kept_forwards: int
    redone_forwards: int
    """At least so many are computed a second time. A stage that is gone has told nobody what it
    had done, but its neighbours had received it."""
    order: tuple[int, ...] = ()
    """One order of all microbatches, where peers stand in for others. Each peer computes its own
    microbatches in this order."""

    def stage(self, plan: Plan, peer_id: str) -> StageReplay | None:
        """None for a peer without a stage."""
        places = plan.places_of(peer_id)
        return _stage(places, self.pipelines, self.order) if places else None

    def progress(self, plan: Plan, peer_id: str) -> StageProgress | None:
        """What a peer may say it has computed, at the beginning of the replay."""
        replay, layers = self.stage(plan, peer_id), plan.layers_of(peer_id)
        if replay is None or not replay.forwards:
            return None
        runs = as_runs(replay.microbatches[: replay.forwards])
        return StageProgress(layers.start, layers.stop, runs, replay.backwards)


def whole_step(plan: Plan, peer_id: str) -> StageReplay:
    """A stage-holder's part in a step of which nothing is done yet."""
    pipelines = [
        PipelineReplay(tuple(each.microbatches), (NOTHING,) * len(each.stages))
        for each in plan.pipelines
    ]
    lists = [each.microbatches for each in pipelines]
    order = merged(plan, lists, {}) if peer_id in plan.stand_ins else ()
    return _stage(plan.places_of(peer_id), pipelines, order)


def _stage(
    places: Sequence[tuple[int, int]], pipelines: Sequence[PipelineReplay], order: Sequence[int]
) -> StageReplay:
    forwards = backwards = 0
    next_has: set[int] = set()
    previous_has: set[int] = set()
    for number, position in places:
        pipeline = pipelines[number]
        before, mine, after = (NOTHING, *pipeline.kept, NOTHING)[position : position + 3]
        forwards, backwards = forwards + mine.forwards, backwards + mine.backwards
        next_has.update(pipeline.microbatches[: after.forwards])
        previous_has.update(pipeline.microbatches[: before.backwards])
    shares = [frozenset(pipelines[number].microbatches) for number, _ in places]
    microbatches = pipelines[places[0][0]].microbatches
    if len(places) > 1:
        all_of_it = frozenset().union(*shares)
        microbatches = tuple(number for number in order if number in all_of_it)
    return StageReplay(
        microbatches,
        forwards,
        backwards,
        frozenset(next_has),
        frozenset(previous_has),
        tuple(shares[1:]),
    )


class _Done(NamedTuple):
    """`StageProgress`, unpacked."""

    layers: range
    forwarded: tuple[int, ...]
    backwards: int


def replay_of(
    plan: Plan, target: Target, contributions: Iterable[Contribution]
) -> PartialReplay | None:
    """None where nobody has begun the step that starts from `target`: then all of it is to do."""
    total = sum(pipeline.microbatch_count for pipeline in plan.pipelines)
    done = {part.member.peer_id: _done(part, target, total) for part in contributions}
    known = {peer_id: item for peer_id, item in done.items() if item is not None}
    if not known:
        return None
    begun = _all_begun(plan, known)
    lists = [(*first, *rest) for first, rest in zip(begun, _deal(plan, begun), strict=True)]
    forwarded = {peer_id: item.forwarded for peer_id, item in known.items()}
    order = merged(plan, lists, forwarded) if plan.stand_ins else ()
    kept = {stage.peer_id: _kept_of(plan, stage, lists, order, known) for stage in _own(plan)}
    redone = [
        PipelineReplay(
            numbers, tuple(_part(kept[s.peer_id], set(numbers)) for s in pipeline.stages)
        )
        for pipeline, numbers in zip(plan.pipelines, lists, strict=True)
    ]
    kept_forwards = sum(stage.forwards for pipeline in redone for stage in pipeline.kept)
    given_up = sum(len(item.forwarded) for item in known.values()) - kept_forwards
    lost = sum(_lost(pipeline.kept) for pipeline in redone)
    return PartialReplay(target.step, tuple(redone), kept_forwards, given_up + lost, order)


def begun_by(
    contributions: Iterable[Contribution], terms: StepTerms | None
) -> tuple[Contribution, ...]:
    """The contributions whose work of the step under way may count. With audits that is none, since
    a claim is about the work of a whole step."""
    return () if terms is not None and terms.audits else tuple(contributions)


def _own(plan: Plan) -> Iterator[Stage]:
    return (s for pipeline in plan.pipelines for s in pipeline.stages if not s.stands_in)


class _KeptNumbers(NamedTuple):
    """The microbatches that a peer keeps, in all its places."""

    forwarded: tuple[int, ...]
    backwards: int


def _kept_of(
    plan: Plan,
    stage: Stage,
    lists: Sequence[tuple[int, ...]],
    order: Sequence[int],
    known: Mapping[str, _Done],
) -> _KeptNumbers:
    numbers = [number for number, _ in plan.places_of(stage.peer_id)]
    due = lists[numbers[0]]
    if len(numbers) > 1:
        all_of_it = {microbatch for number in numbers for microbatch in lists[number]}
        due = tuple(microbatch for microbatch in order if microbatch in all_of_it)
    kept = _kept(due, stage, known)
    return _KeptNumbers(due[: kept.forwards], kept.backwards)


def _part(kept: _KeptNumbers, numbers: set[int]) -> Kept:
    """What a peer keeps of one pipeline's microbatches. These are the pipeline's first ones, since
    the peer computes them in the pipeline's order."""
    return Kept(
        sum(1 for microbatch in kept.forwarded if microbatch in numbers),
        sum(1 for microbatch in kept.forwarded[: kept.backwards] if microbatch in numbers),
    )


def _done(part: Contribution, target: Target, total: int) -> _Done | None:
    """What a contributor has done of this very step; None if that is nothing or cannot be true."""
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


def _all_begun(plan: Plan, known: Mapping[str, _Done]) -> list[tuple[int, ...]]:
    """For each pipeline, the microbatches that it goes on with.

    A peer with several places may have begun microbatches of any of its pipelines. Those that
    nobody else has begun it continues in its own pipeline.
    """
    alone = {peer_id: item for peer_id, item in known.items() if peer_id not in plan.stand_ins}
    begun: list[tuple[int, ...]] = []
    taken: set[int] = set()
    for pipeline in plan.pipelines:
        begun.append(_begun(pipeline, alone, taken))
        taken.update(begun[-1])
    for stage in _own(plan):
        item = known.get(stage.peer_id)
        if stage.peer_id in alone or item is None or item.layers != stage.layers:
            continue
        (number, _), *_ = plan.places_of(stage.peer_id)
        begun[number] += tuple(n for n in item.forwarded if n not in taken)
        taken.update(item.forwarded)
    return begun


def _begun(pipeline: Pipeline, done: Mapping[str, _Done], taken: set[int]) -> tuple[int, ...]:
    """The ordered microbatches with which the stages of a pipeline keep most of their work.

    None of them may be in `taken`, which other pipelines go on with: each counts once.
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
    """What a stage keeps in a pipeline that goes on with `begun`.

    The stage keeps nothing if its summed gradients may hold a microbatch outside of `begun`, which
    others would compute too. It may have done one backward more than it said; that one counts here.
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
    """Forwards that stages must have done and no longer have: later stages had their outputs, or
    earlier stages had the gradients that came back."""
    lost = 0
    for position, stage in enumerate(kept):
        later = max(item.forwards for item in kept[position:])
        earlier = max(item.backwards for item in kept[: position + 1])
        lost += max(later, earlier) - stage.forwards
    return lost


def _deal(plan: Plan, begun: Sequence[Sequence[int]]) -> list[list[int]]:
    """Deals the microbatches that nobody goes on with, to each pipeline up to its planned count."""
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
