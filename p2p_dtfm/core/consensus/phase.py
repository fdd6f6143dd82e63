"""Where a peer stands in the agreement: one of a few phases, and what it waits for in it.

A phase is not stored: it follows from what the peer holds (`AgreementState`), so the two cannot
disagree.
"""

from dataclasses import dataclass
from enum import StrEnum

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.ready_verdict import ready_verdict
from p2p_dtfm.core.consensus.parts.opening import due_verdict
from p2p_dtfm.core.protocol.snapshot import names_of
from p2p_dtfm.core.recovery.view import View


class Phase(StrEnum):
    """Phases of newcomers are those of peers that are in no view."""

    OUTSIDE = "outside"
    NEWCOMER = "newcomer"
    NEWCOMER_GATHERING = "newcomer, gathering"
    NEWCOMER_READY = "newcomer, ready"
    NEWCOMER_AGREED = "newcomer, agreed"
    NEWCOMER_WAITING = "newcomer, between attempts"
    IN_VIEW = "in a view"
    GATHERING = "gathering"
    READY = "ready"
    AGREED = "agreed"
    WAITING = "between attempts"


NEWCOMERS = frozenset(phase for phase in Phase if phase.name.startswith("NEWCOMER"))
MEMBERS = frozenset(Phase) - NEWCOMERS - {Phase.OUTSIDE}
ATTEMPTING = frozenset(
    {Phase.GATHERING, Phase.READY, Phase.NEWCOMER_GATHERING, Phase.NEWCOMER_READY}
)


@dataclass(frozen=True)
class Described:
    """For `docs/agreement.md`: what holds in a phase, and how it ends."""

    holds: str
    ends: str


DESCRIBED = {
    Phase.OUTSIDE: Described(
        "the others went on without it", "begins a new life as a newcomer, or has left"
    ),
    Phase.NEWCOMER: Described(
        "in no view; asks members to be let in",
        "named in a member's Gather; or nobody is in a view for `orphan_ns`",
    ),
    Phase.NEWCOMER_GATHERING: Described(
        "its contribution is fixed; learns the others'",
        "all that must answer know the same; or members have gone on without it; or the deadline",
    ),
    Phase.NEWCOMER_READY: Described(
        "knowledge frozen, planned, Ready said",
        "Ready from all contributors, or a certificate that shows them; or members have gone on "
        "without it; or the deadline",
    ),
    Phase.NEWCOMER_AGREED: Described(
        "fetches the states for its place, says Synced",
        "members are Active in the view; or they have gone another way; or twice as long as "
        "members wait",
    ),
    Phase.NEWCOMER_WAITING: Described(
        "an attempt of newcomers alone has failed", "another one, with a higher number"
    ),
    Phase.IN_VIEW: Described(
        "trains, watches the others, lets its ledger commit once all are Active",
        "a reason for another view; a Gather of a higher number that counts it in; "
        "Standing of a view that counts more",
    ),
    Phase.GATHERING: Described(
        "its contribution is fixed; learns the others'; steps go on if planned, "
        "else none commits and no Prepared is taken",
        "all that must answer know the same; or the deadline",
    ),
    Phase.READY: Described(
        "knowledge frozen, planned, Ready said: once for a number in a life",
        "Ready from all contributors, or a certificate that shows them, also when the next attempt "
        "has begun; or the deadline",
    ),
    Phase.AGREED: Described(
        "only planned: trains on, fetches what its new place needs, says Synced",
        "the first step whose every Prepared says that all are synced; or `sync_ns`, two steps and "
        "what the states take",
    ),
    Phase.WAITING: Described(
        "only unplanned: two attempts or more have failed; no step commits",
        "another one, with a higher number",
    ),
}


def phase_of(state: AgreementState) -> Phase:
    """An attempt under way comes before what was agreed on, and that before the wait."""
    if state.joining.is_outside:
        return Phase.OUTSIDE
    is_newcomer, attempt = state.is_newcomer, state.attempt
    if attempt is not None and attempt.snapshot is not None:
        return Phase.NEWCOMER_READY if is_newcomer else Phase.READY
    if attempt is not None:
        return Phase.NEWCOMER_GATHERING if is_newcomer else Phase.GATHERING
    if state.next_view is not None:
        return Phase.NEWCOMER_AGREED if is_newcomer else Phase.AGREED
    if state.attempts.reopen_ns is not None:
        return Phase.NEWCOMER_WAITING if is_newcomer else Phase.WAITING
    return Phase.NEWCOMER if is_newcomer else Phase.IN_VIEW


@dataclass(frozen=True)
class Outlook:
    """For this peer's user: where it stands, and what it waits for."""

    phase: Phase
    reason: str


def outlook(state: AgreementState, now_ns: int) -> Outlook:
    """Changes nothing."""
    phase, attempt = phase_of(state), state.attempt
    if attempt is not None:
        return Outlook(phase, _of_attempt(attempt))
    if state.next_view is not None:
        return Outlook(phase, _of_agreed(state, state.next_view))
    if state.attempts.reopen_ns is not None:
        wait_s = max(0, state.attempts.reopen_ns - now_ns) / 1_000_000_000
        return Outlook(phase, f"tries again in {wait_s:.0f} s")
    if phase is Phase.OUTSIDE:
        return Outlook(phase, "begins a new life, or has left")
    if state.is_newcomer:
        asks = state.joining.wants_view
        return Outlook(phase, "asks members to be let in" if asks else "has not asked for a view")
    missing = set(state.members) - state.active.keys()
    if missing:
        return Outlook(phase, f"waits for Active from {names_of(missing)}")
    return Outlook(phase, due_verdict(state, now_ns).reason)


def _of_attempt(attempt: Attempt) -> str:
    if attempt.snapshot is not None:
        return ready_verdict(attempt).reason
    if attempt.waits_for:
        return f"waits for what {names_of(attempt.waits_for)} contribute"
    dissenting = set(attempt.dissenting) - {attempt.me}
    if dissenting:
        return f"waits until {names_of(dissenting)} know the same"
    return "all know the same"


def _of_agreed(state: AgreementState, view: View) -> str:
    missing = set(view.members) - state.agreed.synced
    return f"waits for the states of {names_of(missing)}" if missing else "takes over with a step"
