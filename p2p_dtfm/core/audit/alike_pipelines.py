"""Where work is audited and nobody has room for the whole model, pipelines that are cut alike.

Only who has all layers of a stage can compute its work again. A stage that is cut otherwise than
the others has nobody who does, so what its holder makes of them is its word: one that had been
found out came back to such a stage, for there were seven members and the fastest plan for an odd
number was two pipelines of two and one of three.
"""

from collections.abc import Iterator
from itertools import pairwise

from p2p_dtfm.core.cost_model.costs import PlacementCost, StepModel
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.snapshot import Snapshot

Cuts = tuple[int, ...]
Peers = tuple[int, ...]

CUTS_LIMIT = 8
"""Of either kind, that are tried."""


def cut_alike(
    model: StepModel, snapshot: Snapshot, found: PlacementCost, fewest: int, *, at_once: bool
) -> PlacementCost | None:
    """The fastest placement of at least `fewest` pipelines with the cuts of one that was found, or
    with even ones; None if too few have room. `at_once`: by those that have the states, where all
    wait for it."""
    layers, most = model.problem.layer_count, model.problem.peer_count // fewest
    tried = {pipeline.cuts for pipeline in found.pipelines[:CUTS_LIMIT]}
    for stages in range(2, min(most, layers, CUTS_LIMIT) + 1):
        tried.add(tuple(layers * stage // stages for stage in range(stages + 1)))
    made = [
        cost
        for cuts in sorted(tried)
        if (cost := _Cut(model, snapshot, cuts, at_once).placed(found)) is not None
        and len(cost.placement) >= fewest
    ]
    return min(made, key=lambda cost: (cost.step_ns, cost.placement), default=None)


class _Cut:
    """Pipelines of the same cuts."""

    def __init__(self, model: StepModel, snapshot: Snapshot, cuts: Cuts, at_once: bool) -> None:
        self._model = model
        self._cuts = cuts
        self._ids = model.problem.peer_ids
        self._waits = at_once and snapshot.step > 0 and not snapshot.planned
        self._states = snapshot.states() if self._waits else {}
        self._seed = snapshot.knowledge or snapshot.run_digest

    def placed(self, found: PlacementCost) -> PlacementCost | None:
        """Those of `found` stay, then come those that had a stage, then the others, by a draw that
        nobody alone decides."""
        there = zip(found.placement, found.pipelines, strict=True)
        placement = [peers for peers, pipeline in there if pipeline.cuts == self._cuts]
        holders = {peer for peers in found.placement for peer in peers}
        taken = {peer for peers in placement for peer in peers}
        left = sorted(
            set(range(self._model.problem.peer_count)) - taken,
            key=lambda peer: (peer not in holders, digest_bytes(encode([self._seed, peer]))),
        )
        placement += self._more(left)
        placement = placement[: self._model.problem.step.microbatch_count]
        costs = [self._model.pipelines.time_fixed(peers, self._cuts) for peers in placement]
        timed = [cost for cost in costs if cost is not None]
        if not timed or len(timed) < len(placement):
            return None
        return self._model.combine(tuple(placement), timed, None)

    def _more(self, left: list[int]) -> Iterator[Peers]:
        """Of `left`, which loses them."""
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
        problem, pipelines = self._model.problem, self._model.pipelines
        if pipelines.room(peer, first, end) < 1 or not problem.may_hold(peer, first, end):
            return False
        held = self._states.get(self._ids[peer], set())
        return not self._waits or held.issuperset(range(first, end))
