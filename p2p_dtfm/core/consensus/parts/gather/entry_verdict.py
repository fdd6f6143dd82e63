"""Whether a peer takes part in an attempt that somebody tells it of: pure functions of what it
knows."""

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.messages.agreement_messages import Contribution, Gather
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View

NUMBERS_AHEAD_LIMIT = 1 << 16
"""How far a view's number may be above the highest that is known."""


@dataclass(frozen=True)
class EntryVerdict:
    enters: bool
    reason: str
    calls_off: bool = False
    """The message shows that a member does not wait any more for the next view, for which this peer
    has vouched. This peer must not take that view over, unless the step under way does it."""


def entry_verdict(
    state: AgreementState, message: Gather, parts: Sequence[Contribution]
) -> EntryVerdict:
    """`parts`: the contributions that the message shows."""
    proven = [part for part in parts if state.others.views.is_proven(part)]
    refusal = _number_refusal(state, message, proven)
    if refusal:
        return EntryVerdict(False, refusal)
    counting = [it for it in proven if it.present is not None and state.me in it.present.members]
    if state.view is None:
        return _of_newcomer(state, message, parts, proven, bool(counting))
    if message.planned:
        return _of_planned(state, state.view, message, proven)
    return _of_failure(state, state.view, message, counting)


def _number_refusal(state: AgreementState, message: Gather, proven: list[Contribution]) -> str:
    if state.record is None:
        return "has no record of its own yet"
    if message.number <= state.promises.passed_number:
        return "has said Ready to this number, or given it up"
    attempt = state.attempt
    if attempt is not None and message.number < attempt.number:
        return f"takes part in {attempt.number}, which is higher"
    views = [part.present.view.number for part in proven if part.present is not None]
    if message.number > max([state.promises.highest_number, *views]) + NUMBERS_AHEAD_LIMIT:
        return "the number is far above all that are known"
    return ""


def _of_newcomer(
    state: AgreementState,
    message: Gather,
    parts: Sequence[Contribution],
    proven: list[Contribution],
    is_counted: bool,
) -> EntryVerdict:
    if message.planned and is_counted:
        return EntryVerdict(False, "its base counts this peer in: that must be taken over first")
    if state.next_view is not None:
        previous = state.next_view.snapshot.previous
        again = message.planned and bool(proven) and message.base == previous
        return EntryVerdict(again, "the members gather anew" if again else "waits for a takeover")
    if not state.joining.wants_view:
        return EntryVerdict(False, "has not asked for a view")
    asked = any(state.me in part.joiners for part in _namers(state, parts, proven))
    if asked or any(part.member == state.me for part in parts):
        return EntryVerdict(True, "it is let in")
    return EntryVerdict(False, "nobody whose word counts lets it in")


def _namers(
    state: AgreementState, parts: Sequence[Contribution], proven: list[Contribution]
) -> Sequence[Contribution]:
    """Contributions by which a newcomer is let in: those of members. Where no member is among them,
    newcomers' count, if it knows one of these or knows nobody at all."""
    if any(part.present is not None for part in parts):
        return proven
    familiar = state.others.familiar
    knows = familiar.any_of(part.member.peer_id for part in parts)
    return parts if knows or familiar.is_empty else []


def _of_planned(
    state: AgreementState, view: View, message: Gather, proven: list[Contribution]
) -> EntryVerdict:
    members = view.members
    if message.sender not in members and not any(part.member in members for part in proven):
        return EntryVerdict(False, "no member of the present view has opened it")
    if state.frozen:
        return EntryVerdict(False, "a failure is dealt with first")
    if state.ends_here:
        return EntryVerdict(False, "all steps are committed: no view would take over")
    if message.base != view.id:
        return EntryVerdict(False, "it succeeds another view")
    if state.agreed.vouched is not None:
        return EntryVerdict(False, "has said in its Prepared that it waits for another one", True)
    return EntryVerdict(True, "it succeeds the present view")


def possible_openers(
    state: AgreementState, message: Gather, parts: Sequence[Contribution]
) -> set[Member]:
    """Members of which one has opened the attempt.

    In a small view whoever enters tells all, and shows the contributions by which it has entered.
    In a wide view it shows them, too, but only its neighbours hear that from itself. An opener
    could tell one member there, and send all others that member's contribution, as if that member
    had told it. So in a wide view a sender that comes with its own contribution alone has opened
    the attempt. One that brings others' shows nothing.
    """
    brought = {part.member.peer_id for part in parts} | state.attempts.spread_makers
    known = {it for it in state.members if it.peer_id in brought}  # the sender may invent more
    others, view = known - {message.sender}, state.view
    if state.attempts.spread_makers or (view is not None and state.is_wide(view)):
        return set() if others else known
    return others or {message.sender}


def _of_failure(
    state: AgreementState, view: View, message: Gather, counting: list[Contribution]
) -> EntryVerdict:
    if message.number <= view.id.number:
        return EntryVerdict(False, "the present view is newer")
    if not counting:
        return EntryVerdict(False, "nobody in it proves a view with this peer in it")
    if message.sender in view.members:
        return EntryVerdict(True, "members deal with a failure")
    present = (part.present for part in counting)
    later = {it.view for it in present if it is not None and message.sender in it.members}
    # that this peer has said Ready to one does not show that it came to be: a newcomer that says
    # none, and so is in no view, could have all steps stop
    if any(it.number > view.id.number and state.others.views.is_agreed(it) for it in later):
        return EntryVerdict(True, "members of a later view deal with a failure")
    return EntryVerdict(False, "its sender is in no view with this peer")
