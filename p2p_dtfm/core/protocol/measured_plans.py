"""How long steps took under which plan, as members measured: so a plan that gains nothing is left.

Each record tells of the last plans under which its peer has seen some steps. Where several records
tell of one plan, the median counts, so that all plan alike and nobody's word alone decides.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec

from p2p_dtfm.core.protocol.plan import Plan

STAGES_LIMIT = 16
"""Stages of a plan that a record tells of: records stay small."""
PLANS_LIMIT = 4
"""Plans that a record tells of."""
STEPS_ENOUGH = 10
"""Steps that must be measured: fewer say nothing, since steps vary."""

PlanShape = tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]
"""The peers and the cuts of each pipeline; sorted."""


class MeasuredPlan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How long a step takes under a plan of this shape."""

    shape: PlanShape
    step_ns: int


def shape_of(plan: Plan) -> PlanShape:
    """Who holds which layers in which pipeline, however many microbatches each pipeline gets."""
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
    """All peers that had a stage."""
    return frozenset(peer for peers, _ in shape for peer in peers)


def agreed(
    told: Mapping[str, Sequence[MeasuredPlan]], *, by_most: bool = False
) -> dict[PlanShape, int]:
    """The lower median of what members tell of each shape.

    A shape counts only if all its stage-holders that are here tell of it, or more than half of them
    with `by_most`. A peer whose speed has changed forgets its measurements."""
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
