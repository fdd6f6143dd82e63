"""What steps took under which plan, as the members have measured: a gain that does not come is
taken back.

Each record tells of the last plans under which its peer has seen some steps. Where several tell of
one, the median counts, so that all plan alike and nobody's word alone decides.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec

from p2p_dtfm.core.protocol.plan import Plan

STAGES_LIMIT = 16
"""Of a plan that is told of: records stay small."""
PLANS_LIMIT = 4
"""Told of by a peer at a time."""
STEPS_ENOUGH = 10
"""Fewer say nothing: steps waver."""

PlanShape = tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
"""Of each pipeline its peers and its cuts; sorted."""


class MeasuredPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A step under a plan of this shape takes so long."""

    shape: PlanShape
    step_ns: int


def shape_of(plan: Plan) -> PlanShape:
    """Who holds what in which pipeline; however many microbatches go there."""
    return tuple(
        sorted(
            (
                tuple(stage.peer_id for stage in pipeline.stages),
                (0, *(stage.end_layer for stage in pipeline.stages)),
            )
            for pipeline in plan.pipelines
        )
    )


def is_told_of(shape: PlanShape) -> bool:
    """Whether a plan of this shape is small enough for a record."""
    return sum(len(peers) for peers, _ in shape) <= STAGES_LIMIT


def is_sane(measured: Sequence[MeasuredPlan]) -> bool:
    """Whether a record may tell of these."""
    return len(measured) <= PLANS_LIMIT and all(
        is_told_of(plan.shape)
        and plan.shape
        and _names_each_once(plan.shape)
        and 0 < plan.step_ns < 1 << 60
        and all(
            peers and len(cuts) == len(peers) + 1 and _is_rising(cuts) for peers, cuts in plan.shape
        )
        for plan in measured
    )


def _names_each_once(shape: PlanShape) -> bool:
    peers = [peer for each, _ in shape for peer in each]
    return len(set(peers)) == len(peers)


def _is_rising(cuts: Sequence[int]) -> bool:
    return cuts[0] == 0 and all(a < b for a, b in pairwise(cuts))


def names_in(shape: PlanShape) -> frozenset[str]:
    """All who had a stage."""
    return frozenset(peer for peers, _ in shape for peer in peers)


def agreed(
    told: Mapping[str, Sequence[MeasuredPlan]], *, by_most: bool = False
) -> dict[PlanShape, int]:
    """The lower median of what members tell of each shape, if all who had a stage in it and are
    here tell of it as well: whose speed is another one by now forgets it. `by_most`: if more than
    half of those do."""
    found: dict[PlanShape, dict[str, int]] = {}
    for peer_id, measured in told.items():
        for plan in measured:
            found.setdefault(plan.shape, {})[peer_id] = plan.step_ns
    return {
        shape: sorted(each.values())[(len(each) - 1) // 2]
        for shape, each in sorted(found.items())
        if _are_enough(told.keys() & names_in(shape), each.keys(), by_most)
    }


def _are_enough(holders: Collection[str], tell: Collection[str], by_most: bool) -> bool:
    silent = sum(holder not in tell for holder in holders)
    return 2 * silent < len(holders) if by_most else not silent
