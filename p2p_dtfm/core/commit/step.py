"""The step as a transaction: it commits when every stage-holder has said Prepared.

Every peer that sees the same Prepared messages computes the same outcome, bit for bit: sums run in
a fixed order. Prepared that cannot be true, alone or together, commit nothing, and show which peers
are to be left out.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from p2p_dtfm.core.commit.judgement import Conflict, conflict_of, fault_of
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.cost_model.cuts import kept_by_all
from p2p_dtfm.core.messages.prepared import Prepared, Statement, StepOutcome
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.schedule.sums_in_order import added_up


class StepTransaction:
    """Collects Prepared for one step of one view."""

    def __init__(
        self,
        view: ViewId,
        step: int,
        plan: Plan,
        terms: StepTerms | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """`terms` and `counts` as in `judgement.fault_of`."""
        self.view = view
        self.step = step
        self.evidence: dict[str, Signed] = {}
        """For each peer of which a Prepared was refused, one of these."""
        self._plan = plan
        self._terms = terms
        self._counts = counts
        self._holders = plan.stage_holders()
        self._segments = plan.segments()
        self._prepared: dict[str, Prepared] = {}
        self._signed: dict[str, Signed] = {}
        self._conflict: Conflict | None = None

    def record(self, statement: Statement) -> None:
        """Take a Prepared of this view and step. Raises `PeerFault` if it cannot be true."""
        prepared = statement.prepared
        assert (prepared.view, prepared.step) == (self.view, self.step)
        sender = prepared.peer_id
        if sender not in self._holders:
            raise PeerFault("Prepared from a peer without a stage", sender)
        held = self._signed.get(sender)
        if held is not None:
            if held.payload == statement.signed.payload:
                return
            self.evidence.setdefault(sender, statement.signed)
            raise PeerFault(f"two different Prepared for step {self.step}", sender)
        fault = fault_of(prepared, self._plan, self._terms, self._counts)
        if fault:
            self.evidence.setdefault(sender, statement.signed)
            raise PeerFault(fault, sender)
        self._prepared[sender] = prepared
        self._signed[sender] = statement.signed

    @property
    def missing(self) -> tuple[str, ...]:
        """Stage-holders that have not said Prepared."""
        return tuple(holder for holder in self._holders if holder not in self._prepared)

    @property
    def signed(self) -> tuple[Signed, ...]:
        """All Prepared that were taken, in the order of the holders."""
        return tuple(self._signed[item] for item in self._holders if item in self._signed)

    @property
    def said(self) -> Mapping[str, Prepared]:
        """The Prepared that were taken, by their maker."""
        return self._prepared

    @property
    def conflict(self) -> Conflict:
        """Where all Prepared contradict one another.

        While one is missing this is empty, unless most deny some peer's work or a peer has claimed
        two: that peer may never say its own Prepared."""
        if self.missing:
            return self._found_early()
        if self._conflict is None:
            self._conflict = conflict_of(self._prepared, self._plan, self._terms)
        return self._conflict

    def _found_early(self) -> Conflict:
        accounts = [it.audit for it in self._prepared.values() if it.audit is not None]
        denied = Counter(
            peer for it in accounts for peer, is_denied in it.disputed.items() if is_denied
        )
        is_denied = 2 * max(denied.values(), default=0) > len(self._holders)
        claims = {(peer, it.claim) for each in accounts for peer, it in each.heard.items()}
        if not is_denied and len(claims) <= len(self._holders):
            return Conflict()
        return conflict_of(self._prepared, self._plan, self._terms)

    def outcome(self) -> StepOutcome | None:
        """The commit; None while a Prepared is missing, or where the Prepared do not agree."""
        if self.missing or self.conflict.reason:
            return None
        prepared = [self._prepared[holder] for holder in self._holders]
        squared_norm = added_up(
            self._prepared[segment.holders[0]].squared_norms[number]
            for number, segment in enumerate(self._segments)
        )
        token_count = sum(item.token_count for item in prepared)
        held_out_tokens = sum(item.held_out_token_count for item in prepared)
        ready_for = {item.ready_for for item in prepared}
        return StepOutcome(
            step=self.step,
            gradient_norm=math.sqrt(squared_norm),
            loss=mean_loss((item.loss_sum for item in prepared), token_count),
            token_count=token_count,
            held_out_loss=mean_loss((item.held_out_loss_sum for item in prepared), held_out_tokens),
            take_over=ready_for.pop() if len(ready_for) == 1 else None,
            kept=kept_by_all(item.kept for item in prepared),
        )


def mean_loss(loss_sums: Iterable[float], token_count: int) -> float | None:
    """The loss for each token; None where no token counts."""
    return added_up(loss_sums) / token_count if token_count else None
