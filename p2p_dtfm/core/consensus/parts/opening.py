"""When a peer opens an attempt by itself: newcomers ask, speeds change, layers are lost."""

from dataclasses import dataclass

from p2p_dtfm.core.consensus.actions import Actions
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.parts.gather.gathering import Gathering
from p2p_dtfm.core.membership.leaving import is_waited_for
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS

FIRST_STEP_NS = 30 * SECOND_NS
"""How long newcomers wait for the first step of a view of many that has just begun."""


@dataclass(frozen=True)
class DueVerdict:
    """Whether an attempt is due now, and what for; or why none is."""

    opens: bool
    reason: str
    planned: bool = False
    accepts_loss: bool = False
    """This peer has waited long enough for a peer that holds the lost layers."""


def due_verdict(state: AgreementState, now_ns: int) -> DueVerdict:
    """The verdict for a member whose view is in force."""
    view, timing = state.view, state.timing
    if view is None:
        return DueVerdict(False, "is in no view")
    if reason := _why_not_now(state, now_ns):
        return DueVerdict(False, reason)
    planned, newcomers = isinstance(view.plan, Plan), state.others.newcomers
    join, wait = newcomers.due(now_ns, timing.join_window_ns), _has_just_begun(state, view, now_ns)
    if join and not wait:
        return DueVerdict(True, f"{newcomers.count} join", planned)
    if why := _why_plan_anew(state):
        recovers = _recovers(state, view, now_ns)
        reason = "the step that all wait for goes before a better plan" if recovers else why
        return DueVerdict(not recovers, reason, planned)
    if state.present.has_waited(timing.lost_layers_ns, now_ns):
        reason = "goes back to an older state: layers are lost"
        return DueVerdict(True, reason, accepts_loss=True)
    if state.intent is Intent.LEAVING:
        return _of_leaver(state, view, now_ns)
    if join:
        return DueVerdict(False, "of a view of many the first step goes before newcomers")
    return DueVerdict(False, "nothing calls for another view")


def _why_not_now(state: AgreementState, now_ns: int) -> str:
    """Why no attempt is opened now, whatever calls for one; empty if nothing is against it."""
    if state.attempt is not None or state.next_view is not None:
        return "the next view is being agreed on"
    if state.frozen:
        return "a failure is dealt with"
    if now_ns < state.attempts.quiet_until_ns:
        return "an attempt was given up just now"
    if state.ends_here:
        return "all steps are committed: no view would take over"
    return ""


def _why_plan_anew(state: AgreementState) -> str:
    """Why to plan anew; empty if the plan may stay, and nobody waits for another one in vain."""
    stopgap = "others stand in for a lost peer" if state.awaits_new_plan else ""
    return state.attempts.replan_reason or stopgap or state.agreed.call_off


def _recovers(state: AgreementState, view: View, now_ns: int) -> bool:
    """Whether everybody waits for the step that a failure has stopped: planning beside it would
    only hold it up. Where the step takes long, a better plan may be what it needs."""
    is_after_failure = not view.snapshot.planned and isinstance(view.plan, Plan)
    waited_ns = now_ns - state.present.taken_over_ns
    return is_after_failure and not _has_committed(state) and waited_ns < state.timing.gather_ns


def _has_committed(state: AgreementState) -> bool:
    """Whether any step of the view has committed."""
    return state.step > state.present.said_active.step


def _has_just_begun(state: AgreementState, view: View, now_ns: int) -> bool:
    """Whether a view of many has just begun, so that newcomers wait.

    Some of many ask a little too late. A first step has to connect all. Slow machines would never
    finish it beside a new view for each of those newcomers.
    """
    if not state.is_wide(view) or not isinstance(view.plan, Plan):
        return False
    waited_ns = now_ns - state.present.taken_over_ns
    return not _has_committed(state) and waited_ns < FIRST_STEP_NS


def _of_leaver(state: AgreementState, view: View, now_ns: int) -> DueVerdict:
    planned = isinstance(view.plan, Plan)
    waits = is_waited_for(state.me.peer_id, view.snapshot, planned)
    if waits and now_ns - state.present.taken_over_ns < state.timing.lost_layers_ns:
        return DueVerdict(False, "would leave, but nobody who stays has its states")
    return DueVerdict(True, f"{state.me.peer_id} leaves", planned)


class Opening:
    """Each tick, and whenever a newcomer asks, it looks whether an attempt is due."""

    def __init__(self, state: AgreementState, gathering: Gathering) -> None:
        self._state = state
        self._gathering = gathering

    def found(self, now_ns: int) -> Actions:
        """Make the first view, of this peer and the newcomers that asked so far."""
        state = self._state
        assert state.record is not None and state.is_newcomer
        state.joining.wants_view = True
        has_past = state.others.views.highest_number > 0
        reason = f"alone, from step {state.step}" if state.step or has_past else "founding"
        return self._gathering.open(False, reason, now_ns)

    def repeat_step(self, reason: str, now_ns: int) -> Actions:
        """Something of the step under way is lost, though nobody need be: a new view repeats it."""
        if self._state.view_in_force is None or self._state.joining.is_outside:
            return []
        return self._gathering.open(False, reason, now_ns)

    def open_if_due(self, now_ns: int) -> Actions:
        """The attempt that is due, if one is."""
        state = self._state
        if state.is_newcomer:
            return self._found_if_orphaned(now_ns)
        due = due_verdict(state, now_ns)
        if not due.opens:
            return []
        state.present.accepts_loss = state.present.accepts_loss or due.accepts_loss
        return self._gathering.open(due.planned, due.reason, now_ns)

    def open_again(self, now_ns: int) -> Actions:
        """The wait after a failed attempt is over."""
        attempts = self._state.attempts
        if attempts.reopen_ns is None or now_ns < attempts.reopen_ns:
            return []
        return self._gathering.open(False, "the attempt before did not end", now_ns)

    def open_without_lost(self, now_ns: int) -> Actions:
        """Open an attempt without members that were lost just before their view was taken over, and
        are not back, or that keep all from the next view."""
        state, view = self._state, self._state.view_in_force
        settled_ns = state.present.taken_over_ns + state.timing.resend_ns
        if view is None or now_ns < settled_ns:
            return []
        lost = sorted(state.doubts.suspects & set(view.members))
        names = ", ".join(member.peer_id for member in lost)
        return self._gathering.open(False, f"{names} did not come along", now_ns) if lost else []

    def _found_if_orphaned(self, now_ns: int) -> Actions:
        """A newcomer that hears of no view for long makes one with other newcomers."""
        state, joining, timing = self._state, self._state.joining, self._state.timing
        if state.attempt is not None or state.next_view is not None:
            return []
        if not joining.wants_view or not timing.orphan_ns:
            return []
        if joining.view_heard_ns is None:
            joining.view_heard_ns = now_ns + state.prng.below(timing.resend_ns)
        if now_ns - joining.view_heard_ns < timing.orphan_ns:
            return []
        joining.view_heard_ns = now_ns + state.prng.below(timing.resend_ns)
        return self._gathering.open(False, "nobody is in a view", now_ns)
