"""Costs of placements to which a search of few peers comes again and again.

Work is counted as if each were worked out anew: so a search ends where it always did, only sooner.
"""

from dataclasses import dataclass

from p2p_dtfm.core.cost_model.costs import (
    EACH_PIPELINE_WORK,
    PLACEMENT_WORK,
    Placement,
    PlacementCost,
    StepModel,
)
from p2p_dtfm.core.cost_model.pipeline_cost import PipelineCost, split_microbatches

MOST_PEERS = 8
"""What the model remembers of so few it never forgets: from the second time on, a placement takes
the same work each time."""
KNOWN_LIMIT = 1 << 13
_NEVER_NS = 1 << 100


@dataclass(slots=True)
class _Known:
    """Of a placement that has come once."""

    longest_ns: int = 0
    """Which a bound must not be below; worked out when it comes for the second time."""
    is_reduced: bool = False
    """Its reduction has been timed, too."""
    cost: PlacementCost | None = None
    work: int = 0


class RememberedCosts:
    """`cost` is that of the model."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._known: dict[Placement, _Known] = {}
        self._remembers = model.problem.peer_count <= MOST_PEERS

    def cost(self, placement: Placement, bound_ns: int) -> PlacementCost | None:
        """See `StepModel.cost`."""
        model, known = self._model, self._known.get(placement)
        if known is not None:
            if bound_ns < known.longest_ns:
                model.spend(PLACEMENT_WORK + EACH_PIPELINE_WORK * len(placement))
                return None
            if known.cost is not None:
                model.spend(known.work)
                return known.cost
        began = model.work
        found = model.cost(placement, bound_ns)
        if self._remembers:
            self._remember(placement, known, found, model.work - began)
        return found

    def _remember(
        self, placement: Placement, known: _Known | None, found: PlacementCost | None, work: int
    ) -> None:
        if known is None:
            if len(self._known) >= KNOWN_LIMIT:
                self._known.clear()
            known = self._known[placement] = _Known()
        elif not known.longest_ns:
            known.longest_ns = self._longest_ns(placement)
        if found is not None:
            if known.is_reduced:
                known.cost, known.work = found, work
            known.is_reduced = True

    def _longest_ns(self, placement: Placement) -> int:
        """Of its pipelines; more than any bound where one does not fit."""
        costs = [cost for cost, _ in map(self._model.pipelines.cost, placement) if cost is not None]
        if len(costs) < len(placement):
            return _NEVER_NS
        dealt = split_microbatches(costs, self._model.problem.step.microbatch_count)
        return max(
            PipelineCost.duration_ns(*each) for each in zip(costs, dealt, strict=True) if each[1]
        )
