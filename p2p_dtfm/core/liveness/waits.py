"""Which waits a plan allows: what a peer may say that it lacks, and of whom."""

from collections import defaultdict
from itertools import pairwise

from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.schedule.tied_ends import other_end

_PHASE = {
    Kind.ACTIVATION: 0,
    Kind.GRADIENT: 0,
    Kind.PART: 1,
    Kind.SUM: 1,
    Kind.RECEIPT: 2,
    Kind.CLAIM: 3,
    Kind.AUDIT: 4,
    Kind.PREPARED: 5,
    Kind.ACTIVE: 6,
}
_NEED_NOTHING = (Kind.RECEIPT, Kind.ACTIVE)
"""A peer gives these as soon as what they are for has come."""
_OWN_FIRST = (Kind.CLAIM, Kind.AUDIT, Kind.PREPARED)
"""A peer that lacks these of others has said its own."""
COMPUTED_AGAIN_FOR = (Kind.AUDIT, Kind.PREPARED)
"""Words on works that others did. A peer that owes one may lack what those others got of anybody.
"""
TENSORS = (Kind.ACTIVATION, Kind.GRADIENT, Kind.PART, Kind.SUM)
WORDS = (Kind.CLAIM, Kind.PREPARED)
"""Words that need nothing but what their maker has, once nobody lacks a tensor of it."""


def may_wait(owed: Kind, lacked: Kind, *, both_in_one_step: bool) -> bool:
    """Whether a peer that owes `owed` may have to wait for `lacked` first.

    Anything may be lacked of an earlier step. Within a step, what comes late holds up nothing that
    comes before it. A peer that lacks others' claims, audits or Prepared has said its own.
    """
    if not both_in_one_step:
        return True
    if owed in _NEED_NOTHING or (owed is lacked and owed in _OWN_FIRST):
        return False
    return _PHASE[lacked] <= _PHASE[owed]


class PossibleWaits:
    """Who may lack what of whom in a view. `ends_meet`: the sums of a tied matrix come from both
    ends of a pipeline. `audits`: works are computed again."""

    def __init__(self, view: View, ends_meet: bool = False, audits: bool = False) -> None:
        plan = view.plan
        self.audits = audits
        self.members = frozenset(view.member_ids)
        self._before: dict[str, set[str]] = defaultdict(set)
        self._after: dict[str, set[str]] = defaultdict(set)
        self._beside: dict[str, set[str]] = defaultdict(set)
        self._layers: dict[str, range] = {}
        self._firsts: dict[str, set[int]] = defaultdict(set)
        """By peer: the first layer of each of its stages, whose gradients it computes last."""
        self._other_ends: dict[str, tuple[int, str]] = {}
        self._guards: dict[str, set[str]] = defaultdict(set)
        self._holders: frozenset[str] = frozenset()
        if isinstance(plan, Plan):
            self._read(plan, view)
            if ends_meet:
                self._read_ends(plan)

    def _read(self, plan: Plan, view: View) -> None:
        self._holders = frozenset(plan.stage_holders())
        self._layers = {holder: plan.layers_of(holder) for holder in self._holders}
        for pipeline in plan.pipelines:
            peers = [stage.peer_id for stage in pipeline.stages]
            for stage in pipeline.stages:
                self._firsts[stage.peer_id].add(stage.first_layer)
            for one, other in pairwise(peers):
                self._before[other].add(one)
                self._after[one].add(other)
        for segment in plan.segments():
            for holder in segment.holders:
                self._beside[holder] |= set(segment.holders)
        for layer, guardian in view.guards.items():
            for holder in plan.holders(layer):
                self._guards[holder].add(guardian)

    def _read_ends(self, plan: Plan) -> None:
        for holder in self._holders:
            lacked = other_end(plan, holder)
            if lacked is not None:
                self._beside[holder].add(lacked[1])
                self._other_ends[holder] = lacked

    def has_stage(self, peer_id: str) -> bool:
        return peer_id in self._holders

    @property
    def stage_count(self) -> int:
        """How many peers have a stage."""
        return len(self._holders)

    def sees_to_the_end(self, one: str, other: str) -> bool:
        """Whether `one` holds the layers whose gradients `other` computes last. If so, and it has
        got all that it is owed of them, it knows that `other` has computed all. A peer that shares
        only later layers with `other` does not: `other` computes from these to its first layer."""
        layers, end = self._layers.get(one, range(0)), self._other_ends.get(one)
        shared = (first in layers or end == (first, other) for first in self._firsts[other])
        return other in self._beside[one] and all(shared)

    def allow(self, owed: Kind, waiting: str, lack: Lack) -> bool:
        """Whether the plan lets `waiting`, which owes `owed`, lack this."""
        of = lack.peer_id
        if of == waiting:
            return False
        if self.audits and owed in COMPUTED_AGAIN_FOR and self._may_be_asked(lack):
            return True
        if lack.kind is Kind.ACTIVATION:
            return of in self._before[waiting]
        if lack.kind is Kind.GRADIENT:
            return of in self._after[waiting]
        if lack.kind is Kind.RECEIPT:
            return of in self._guards[waiting]
        if lack.kind in _OWN_FIRST:
            return of in self._holders
        return of in (self.members if lack.kind is Kind.ACTIVE else self._beside[waiting])

    def _may_be_asked(self, lack: Lack) -> bool:
        """Whether the peer may be asked by one that computes a work again, for what it has given to
        that work's maker."""
        given = {Kind.ACTIVATION: self._after, Kind.GRADIENT: self._before, Kind.PART: self._beside}
        return lack.kind in given and bool(
            given[lack.kind].get(lack.peer_id, set()) - {lack.peer_id}
        )
