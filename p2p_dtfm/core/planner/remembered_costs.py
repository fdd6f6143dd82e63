"""A cache of costs of placements to which a search returns, in whatever order of pipelines.

Work is counted as if each cost were worked out anew, so a search ends at the same placement, only
sooner.
"""

from dataclasses import dataclass, field

from p2p_dtfm.core.cost_model.costs import (
    EACH_PIPELINE_WORK,
    PLACEMENT_WORK,
    Placement,
    PlacementCost,
    StepModel,
)

MOST_PEERS = 32
"""Among more peers, placements hardly ever come again."""
KNOWN_LIMIT = 1 << 13
LOOKED_AT_WHOLE = 8
"""With so few peers, all pipelines of a placement that does not fit are timed when it comes again.
They are then not new to later placements. It was once so, and what a search counts must not change.
"""

_NO_BOUND_NS = 1 << 200


@dataclass(slots=True)
class _Known:
    """What is known of a placement whose pipelines all fit, in any order."""

    longest_ns: int = 0
    """The pipelines take at least so long."""
    work: int = 0
    cost: PlacementCost | None = None
    tied: dict[Placement, PlacementCost] = field(default_factory=dict)
    """The cost in each order of pipelines, where the order matters."""


class RememberedCosts:
    """The model's costs, remembered."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._known: dict[Placement, _Known] = {}
        self._forgotten = model.forgotten
        self._came: set[Placement] = set()
        self._remembers = model.problem.peer_count <= MOST_PEERS
        self._looks_at_whole = model.problem.peer_count <= LOOKED_AT_WHOLE

    def of_start(self, placement: Placement) -> PlacementCost | None:
        """The cost of a start, to which no move has led."""
        if not self._remembers:
            return self._model.cost(placement)
        return self._cost(placement, _NO_BOUND_NS, False)

    def cost(self, placement: Placement, bound_ns: int) -> PlacementCost | None:
        """The same as `StepModel.cost`."""
        if not self._remembers:
            return self._model.cost(placement, bound_ns)
        comes_again = self._looks_at_whole and self._comes_again(placement)
        return self._cost(placement, bound_ns, comes_again)

    def _cost(self, placement: Placement, bound_ns: int, comes_again: bool) -> PlacementCost | None:
        model = self._model
        if model.forgotten != self._forgotten:
            self._forgotten = model.forgotten
            self._known.clear()
        key = tuple(sorted(placement)) if len(placement) > 1 else placement
        known = self._known.get(key)
        if known is None:
            return self._worked_out(placement, key, bound_ns, comes_again)
        if bound_ns < known.longest_ns:
            model.spend(PLACEMENT_WORK + EACH_PIPELINE_WORK * len(placement))
            return None
        cost = known.cost or known.tied.get(placement)
        if cost is None:
            return self._worked_out(placement, key, bound_ns, comes_again)
        model.spend(known.work)
        return _in_order(cost, placement)

    def _worked_out(
        self, placement: Placement, key: Placement, bound_ns: int, comes_again: bool
    ) -> PlacementCost | None:
        model = self._model
        began = model.work - model.first_work
        costs = model.timed(placement)
        if costs is None:
            for peers in placement if comes_again else ():
                model.pipelines_in(len(placement)).cost(peers)
            return None
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= KNOWN_LIMIT:
                self._known.clear()
            known = self._known[key] = _Known()
        found = model.combine(placement, costs, bound_ns)
        if found is None:
            known.longest_ns = bound_ns + 1
            return None
        known.work = model.work - model.first_work - began
        known.longest_ns = found.pipelines_ns
        if not found.is_tied:
            known.cost = found
        elif len(known.tied) < KNOWN_LIMIT:
            known.tied[placement] = found
        return found

    def _comes_again(self, placement: Placement) -> bool:
        if placement in self._came:
            return True
        if len(self._came) >= KNOWN_LIMIT:
            self._came.clear()
        self._came.add(placement)
        return False


def _in_order(cost: PlacementCost, placement: Placement) -> PlacementCost:
    """The cost with its pipelines in the order of `placement`, without those that have no
    microbatch."""
    if cost.placement == placement:
        return cost
    pairs = zip(cost.pipelines, cost.microbatches, strict=True)
    of = dict(zip(cost.placement, pairs, strict=True))
    used = tuple([peers for peers in placement if peers in of])
    return PlacementCost(
        used,
        tuple([of[peers][0] for peers in used]),
        tuple([of[peers][1] for peers in used]),
        cost.compute_ns,
        cost.reduction_ns,
        cost.commit_ns,
        cost.critical,
        cost.pipelines_ns,
    )
