"""Where work is audited and nobody has room for the whole model, pipelines that are cut alike.

A peer with other layers is lent a stage's parameters to compute its work again (`judging`), if it
has room for them. Nobody else holds a stage that is cut otherwise than the others. What its
parameters are is its holder's word, and where memory is short nobody judges it. A convicted liar
once came back to such a stage: the fastest plan for seven members was two pipelines of two and one
of three.
"""

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from itertools import pairwise

from p2p_dtfm.core.cost_model.costs import PlacementCost, StepModel
from p2p_dtfm.core.cost_model.pipeline_cost import PipelineCost
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.snapshot import Snapshot

Cuts = tuple[int, ...]
Peers = tuple[int, ...]

CUTS_LIMIT = 8
"""So many are tried, of those that were found and of those of even length."""
SEVERAL = 2
"""At least so many pipelines: their stages are shared."""
GAIN_DIVISOR = 10
"""Other cuts must be faster than those of the plan in force by at least one part in so many."""


def cut_alike(
    model: StepModel, snapshot: Snapshot, found: PlacementCost, fewest: int, *, at_once: bool
) -> PlacementCost | None:
    """The fastest placement of at least `fewest` pipelines that are cut alike; None if too few
    peers have room. Cuts are those of a pipeline that was found or is in force, or even ones.
    `at_once`: where all would wait for states, only peers that have them get a stage."""
    problem = model.problem
    layers = problem.layer_count
    most = min(problem.peer_count // fewest, layers, problem.most_stages, CUTS_LIMIT)
    present = _standing(model, snapshot)
    standing = {cuts for _, cuts in present}
    tried = {pipeline.cuts for pipeline in found.pipelines[:CUTS_LIMIT]} | standing
    for stages in range(2, most + 1):
        tried.add(tuple(layers * stage // stages for stage in range(stages + 1)))
    made = [
        cost
        for cuts in sorted(tried)
        if len(cuts) - 1 <= most
        and (cost := _Cut(model, snapshot, cuts, at_once).placed(found, present)) is not None
        and len(cost.placement) >= fewest
    ]
    best = min(made, key=lambda cost: (cost.step_ns, cost.placement), default=None)
    for stands in made:
        if best is not None and stands.pipelines[0].cuts in standing:
            gain_ns = stands.step_ns - best.step_ns
            return best if gain_ns * GAIN_DIVISOR > stands.step_ns else stands
    return best


def _standing(model: StepModel, snapshot: Snapshot) -> list[tuple[Peers, Cuts]]:
    """Those pipelines of the plan in force whose peers are all here."""
    if snapshot.present is None:
        return []
    place_of = {peer_id: place for place, peer_id in enumerate(model.problem.peer_ids)}
    found = []
    for pipeline in snapshot.present.vacated().pipelines:
        peers = [place_of.get(stage.peer_id) for stage in pipeline.stages]
        here = tuple(peer for peer in peers if peer is not None)
        if len(here) == len(peers):
            ends = (stage.end_layer for stage in pipeline.stages)
            found.append((here, (0, *ends)))
    return found


class _Cut:
    """Pipelines of the same cuts."""

    def __init__(self, model: StepModel, snapshot: Snapshot, cuts: Cuts, at_once: bool) -> None:
        self._model = model
        self._pipelines = model.pipelines_in(SEVERAL)
        self._cuts = cuts
        self._ids = model.problem.peer_ids
        self._waits = at_once and snapshot.step > 0 and not snapshot.planned
        self._states = snapshot.states() if self._waits else {}
        self._seed = snapshot.knowledge or snapshot.run_digest

    def placed(
        self, found: PlacementCost, present: Sequence[tuple[Peers, Cuts]]
    ) -> PlacementCost | None:
        """Pipelines with these cuts: first those of the plan in force, `present`, and of `found`.
        Others are made of peers with a stage in `found`, then of the rest, by a draw that nobody
        alone decides."""
        there = zip(found.placement, found.pipelines, strict=True)
        wanted = [*present, *((peers, pipeline.cuts) for peers, pipeline in there)]
        placement: list[Peers] = []
        taken: set[int] = set()
        for peers, cuts in wanted:
            if cuts != self._cuts or not taken.isdisjoint(peers):
                continue
            if all(map(self._fits, peers, self._cuts[:-1], self._cuts[1:])):
                placement.append(peers)
                taken |= set(peers)
        holders = {peer for peers in found.placement for peer in peers}
        left = sorted(
            set(range(self._model.problem.peer_count)) - taken,
            key=lambda peer: (peer not in holders, digest_bytes(encode([self._seed, peer]))),
        )
        placement += self._more(left)
        placement = placement[: self._model.problem.step.microbatch_count]
        costs = [self._pipelines.time_fixed(peers, self._cuts) for peers in placement]
        timed = [cost for cost in costs if cost is not None]
        if not timed or len(timed) < len(placement):
            return None
        made = self._model.combine(tuple(placement), timed, None)
        if made is None or len(made.placement) == len(placement):
            return made
        dealt = _one_at_least(timed, self._model.problem.step.microbatch_count)
        return self._model.dealt(tuple(placement), timed, dealt)

    def _more(self, left: list[int]) -> Iterator[Peers]:
        """Further pipelines of the peers in `left`, which loses them."""
        while True:
            chosen: list[int] = []
            for first, end in pairwise(self._cuts):
                able = (it for it in left if it not in chosen and self._fits(it, first, end))
                chosen += [peer] if (peer := next(able, None)) is not None else []
            if len(chosen) < len(self._cuts) - 1:
                return
            left[:] = [peer for peer in left if peer not in chosen]
            yield tuple(chosen)

    def _fits(self, peer: int, first: int, end: int) -> bool:
        problem = self._model.problem
        if self._pipelines.room(peer, first, end) < 1 or not problem.may_hold(peer, first, end):
            return False
        held = self._states.get(self._ids[peer], set())
        return not self._waits or held.issuperset(range(first, end))


def _one_at_least(costs: Sequence[PipelineCost], microbatches: int) -> tuple[int, ...]:
    """Each pipeline gets one microbatch, and each further one goes where it ends soonest. So a
    peer that says it is fast does not get all of them alone."""
    counts = [1] * len(costs)
    ends = [(cost.duration_ns(2), at) for at, cost in enumerate(costs)]
    heapify(ends)
    for _ in range(microbatches - len(costs)):
        _, at = ends[0]
        counts[at] += 1
        heapreplace(ends, (costs[at].duration_ns(counts[at] + 1), at))
    return tuple(counts)
