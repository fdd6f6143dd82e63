"""What this peer says to peers outside the view, and how it becomes one of them."""

from p2p_dtfm.core.consensus.actions import Actions, Left, Rejoin, SendMessage, StopStep
from p2p_dtfm.core.consensus.agreement_state import MEMBERS_LIMIT, AgreementState
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    JoinRequest,
    Reminder,
    Standing,
)
from p2p_dtfm.core.messages.prepared import with_room
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View

COMMIT_TOLD = 16
COMMIT_TOLD_BYTES = 96 * 1024
"""How many Prepared of the last commit peers outside are told: each shows how far the view has
come. So many fit beside the certificate of 1,024 members
(`core.gate.gate_table.STANDING_BYTES`)."""


class Outsiders:
    """Each outsider is told where this peer stands, at most once in a resend interval."""

    def __init__(self, state: AgreementState) -> None:
        self._state = state

    def standing_of(self, view: View, reminder: Reminder | None = None) -> Standing:
        """Where this peer stands in its view; a `reminder` goes with it to the peer that it is
        for."""
        state = self._state
        has_plan = isinstance(view.plan, Plan)
        # Without a plan members are at unlike steps: all must compare alike, or they go to and fro.
        step = state.step if has_plan else view.snapshot.step
        assert view.certificate is not None
        ancestors = tuple(item for item in state.others.views.told if item != view.id)
        commit = state.present.newest_commit[:COMMIT_TOLD] if has_plan else ()
        commit = with_room(commit, COMMIT_TOLD_BYTES)
        follows = tuple(sorted(state.others.familiar.given))
        farewells = state.others.farewells.shown_with(view.certificate)
        told = ancestors, commit, follows, reminder, farewells
        run_digest = state.settings.run_digest
        said = Standing(state.me, view.certificate, has_plan, step, run_digest, *told)
        return stated(said, state.settings.sign)

    def answer(self, sender: Member, now_ns: int, reminder: Reminder | None = None) -> Actions:
        """Somebody outside the view speaks: it hears of the view."""
        view = self._state.view_in_force
        is_told = not self.may_tell(sender.peer_id, now_ns)
        if view is None or is_told or sender in view.members or self._comes_along(sender):
            return []
        return self.tell(sender.peer_id, self.standing_of(view, reminder), now_ns)

    def _comes_along(self, sender: Member) -> bool:
        """Whether the sender comes along into a view of many that is agreed on, or about to be. It
        needs no proof of the present view."""
        state = self._state
        if state.next_view is not None:
            return state.is_wide(state.next_view) and sender in state.next_view.members
        attempt = state.attempt
        if attempt is None or attempt.wide is None or attempt.snapshot is None:
            return False
        return sender in attempt.snapshot.contributors

    def may_tell(self, peer_id: str, now_ns: int) -> bool:
        """Whether the last such message was long enough ago."""
        resend_ns = self._state.timing.resend_ns
        told_ns = self._state.others.told_ns.get(peer_id, -resend_ns)
        return now_ns - told_ns >= resend_ns

    def tell(self, peer_id: str, message: AgreementMessage, now_ns: int) -> Actions:
        """At most one such message to a peer in each resend interval."""
        if not self.may_tell(peer_id, now_ns):
            return []
        told_ns = self._state.others.told_ns
        if len(told_ns) >= 4 * MEMBERS_LIMIT:
            told_ns.clear()
        told_ns[peer_id] = now_ns
        return [SendMessage((peer_id,), message)]

    def tell_while_frozen(self, newcomer: str, now_ns: int) -> Actions:
        """Tell a newcomer that there is a view, whose members deal with a failure: it must make
        none of its own."""
        state = self._state
        if state.view is None or not state.frozen:
            return []
        return self.tell(newcomer, self.standing_of(state.view), now_ns)

    def join_request(self, record: Signed) -> JoinRequest:
        """A request to be let in with this record."""
        state = self._state
        awaits = state.next_view.id if state.next_view is not None else None
        return JoinRequest(record, awaits, state.promises.passed_number)

    def rejoin(
        self,
        reason: str,
        gives_up_steps: bool = False,
        pause_ns: int = 0,
        may_be_needed: bool = False,
    ) -> Actions:
        """The others are elsewhere: this peer is in no view any more.

        A peer that wants to leave goes at once. With `may_be_needed` it does not if it has states,
        since the others may need them. It then asks to be let in, and leaves as anybody does.
        """
        state = self._state
        state.joining.is_outside = True
        state.attempts.frozen = True
        state.attempts.under_way = state.agreed.view = None
        state.recovery_evidence.freeze(state.ledger)
        brings = may_be_needed and bool(state.recovery_evidence.held)
        leaves = state.intent is Intent.LEAVING and not brings
        again = Rejoin(reason, gives_up_steps, pause_ns, is_needed=brings)
        return [StopStep(), Left() if leaves else again]
