"""What a peer says of its work: what it lacks, of whom; and which such waits a plan allows."""

from collections import defaultdict
from enum import StrEnum
from itertools import pairwise

import msgspec

from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.snapshot import ViewId
from p2p_dtfm.core.view import View

LACKS_LIMIT = 64
"""Said at most; what is beyond is not heard."""


class Kind(StrEnum):
    """What one peer may owe another in a step."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    PART = "part"
    SUM = "sum"
    RECEIPT = "receipt"
    PREPARED = "prepared"
    ACTIVE = "active"


_PHASE = {
    Kind.ACTIVATION: 0,
    Kind.GRADIENT: 0,
    Kind.PART: 1,
    Kind.SUM: 1,
    Kind.RECEIPT: 2,
    Kind.PREPARED: 3,
    Kind.ACTIVE: 4,
}
_NEED_NOTHING = (Kind.RECEIPT, Kind.ACTIVE)
"""To be given as soon as what they are for has come."""


class Lack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Something that has not come, of the peer that owes it."""

    peer_id: str
    kind: Kind
    layer: int = 0
    index: int = 0


class Work(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a peer stands in a view's step."""

    view: ViewId
    step: int
    computes: bool = False
    """Something is computed, or is about to be."""
    lacks: tuple[Lack, ...] = ()
    sends_to: tuple[str, ...] = ()
    """What is on its way to these has not been accepted yet."""
    fetches: bool = False
    """States or data for this step are on their way here."""


def may_wait(owed: Kind, lacked: Kind, *, both_in_one_step: bool) -> bool:
    """Whether who owes `owed` may have to wait for `lacked` first.

    Of an earlier step anything may be lacked. What is lacked last in a step holds up nothing that
    comes before it; and who lacks others' Prepared has said its own.
    """
    if not both_in_one_step:
        return True
    if owed in _NEED_NOTHING or (owed is lacked is Kind.PREPARED):
        return False
    return _PHASE[lacked] <= _PHASE[owed]


class PossibleWaits:
    """Who may lack what of whom in a view."""

    def __init__(self, view: View) -> None:
        plan = view.plan
        self._members = frozenset(view.member_ids)
        self._before: dict[str, set[str]] = defaultdict(set)
        self._after: dict[str, set[str]] = defaultdict(set)
        self._beside: dict[str, set[str]] = defaultdict(set)
        self._guards: dict[str, set[str]] = defaultdict(set)
        self._holders: frozenset[str] = frozenset()
        if isinstance(plan, Plan):
            self._read(plan, view)

    def _read(self, plan: Plan, view: View) -> None:
        self._holders = frozenset(plan.stage_holders())
        for pipeline in plan.pipelines:
            peers = [stage.peer_id for stage in pipeline.stages]
            for one, other in pairwise(peers):
                self._before[other].add(one)
                self._after[one].add(other)
        for segment in plan.segments():
            for holder in segment.holders:
                self._beside[holder] |= set(segment.holders)
        for layer, guardian in view.guards.items():
            for holder in plan.holders(layer):
                self._guards[holder].add(guardian)

    def allow(self, waiting: str, lack: Lack) -> bool:
        """Whether the plan lets `waiting` lack this."""
        of = lack.peer_id
        if of == waiting:
            return False
        if lack.kind is Kind.ACTIVATION:
            return of in self._before[waiting]
        if lack.kind is Kind.GRADIENT:
            return of in self._after[waiting]
        if lack.kind is Kind.RECEIPT:
            return of in self._guards[waiting]
        if lack.kind is Kind.PREPARED:
            return of in self._holders
        return of in (self._members if lack.kind is Kind.ACTIVE else self._beside[waiting])
