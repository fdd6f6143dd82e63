"""Leaderless agreement on a view: Gather until all know the same, say Ready, then take over.

A sans-I/O state machine. Inputs are its methods; each returns the actions that the caller must
carry out. Time is the `now_ns` of each input, and planning, which may take long, is an action
whose result comes back as an input.

    Gather   everyone's contribution is flooded until all digests of the knowledge are equal
    Ready    the knowledge is frozen and planned; Ready from every contributor makes a view agreed
    Synced   each member of the agreed view has the state that its place needs, or follows it
    takeover a planned view: after the first step whose every Prepared says that all are synced.
             An unplanned one: at once, from the step that its contributions lead to
    Active   said by who takes over; no step commits before all members have said it

A view change is planned (even numbers) while steps go on, unplanned (odd numbers) after a failure
or where no steps happen. Entering an unplanned Gather freezes the step under way: from then on
what each peer contributes decides whether it is rolled forward or repeated
(`core.recovery.restart_point`).

A number is given at most one Ready in a life, and an attempt with a higher number replaces a
lower one. `docs/decisions/0002-takeover-by-prepared.md` says why takeover is decided by Prepared.
"""

from p2p_dtfm.core.consensus.actions import (
    LAN,
    SECOND_NS,
    WAN,
    Action,
    Actions,
    ComputePlan,
    Disagreed,
    Left,
    Rejoin,
    Report,
    SendMessage,
    StopStep,
    TakeOver,
    Timing,
    ViewAgreed,
)
from p2p_dtfm.core.consensus.agreement_state import MEMBERS_LIMIT
from p2p_dtfm.core.consensus.meeting import Meeting
from p2p_dtfm.core.consensus.patience import patience_ns
from p2p_dtfm.core.membership.leaving import is_waited_for
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    AgreementMessage,
    Gather,
    Heartbeat,
    JoinRequest,
    Ready,
    Standing,
)
from p2p_dtfm.core.messages.message_bounds import require_bounded
from p2p_dtfm.core.messages.statements import STATEMENTS, require_stated
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent, PeerRecord
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member

NUMBERS_PASSED_LIMIT = 64
"""By so much a newcomer may raise the number of the next attempt."""
NEWCOMER_RECORD_BYTES = 8 * 1024
LINK_BYTES = 128
"""How large a newcomer's record may be: some more for each member, to which it may have a link."""


class Agreement(Meeting):
    """One peer's part in agreeing on views.

    `step` is the number of its committed steps, `held` the version of each layer whose state it
    has; the caller keeps `held` up to date.
    """

    def begin_life(self, record: PeerRecord, signed: Signed) -> JoinRequest:
        """After `Rejoin`: be a newcomer, with a higher life."""
        assert record.life > self.me.life
        self._begin(Member(record.peer_id, record.life))
        self.set_record(record, signed)
        return self.wants_view()

    def found(self, now_ns: int) -> Actions:
        """Make the first view, of this peer and the newcomers that asked so far."""
        assert self._record is not None and self.view is None
        self._wants_view = True
        reason = f"alone, from step {self.step}" if self.step else "founding"
        return self._open(False, reason, now_ns)

    def wants_view(self) -> JoinRequest:
        """Become a newcomer that may be let in; the caller sends the request to other peers."""
        assert self._record is not None and self.view is None
        self._wants_view = True
        return self._join_request(self._record)

    def request_replan(self, reason: str, now_ns: int) -> Actions:
        """Ask for a view with the newest records, as after a change of speed."""
        self._replan_reason = reason
        self._replan_number = 0
        return self.tick(now_ns)

    def repeat_step(self, reason: str, now_ns: int) -> Actions:
        """Something of the step under way is lost, though nobody need be: a new view repeats it."""
        view = self.view
        if view is None or self.frozen or self._outside or self.me not in view.members:
            return []
        return self._open(False, reason, now_ns)

    def receive(self, sender: str, message: AgreementMessage, now_ns: int) -> Actions:
        """A message from `sender`, authenticated by the transport. Raises `PeerFault`."""
        if self._outside:
            return []
        require_bounded(message, sender)
        if isinstance(message, JoinRequest):
            return self._receive_join_request(sender, message, now_ns)
        if message.sender.peer_id != sender:
            raise PeerFault("speaks for another peer", sender)
        if message.sender.life < self._lives.get(sender, 0) or message.sender == self.me:
            return []
        if isinstance(message, STATEMENTS):
            require_stated(message, self._verify)
        actions = self._hear(message.sender, now_ns)
        try:
            return actions + self._receive_by_kind(message, now_ns)
        except PeerFault:
            if not actions:
                raise
            return actions  # what hearing from it has begun must be carried out all the same

    def _receive_by_kind(self, message: AgreementMessage, now_ns: int) -> Actions:
        if isinstance(message, Gather):
            return self._receive_gather(message, now_ns)
        if isinstance(message, Ready):
            return self._receive_ready(message, now_ns)
        if isinstance(message, Active):
            return self._receive_active(message, now_ns)
        if isinstance(message, Standing):
            return self._receive_standing(message, now_ns)
        if isinstance(message, Heartbeat):
            self._note_progress(message, now_ns)
            return self._answer_outsider(message.sender, now_ns)
        assert not isinstance(message, JoinRequest)
        return self._receive_synced(message, now_ns)

    def tick(self, now_ns: int) -> Actions:
        """Time has passed: resend, give up on the silent, open an attempt that is due."""
        if self._outside:
            return []
        self._wake_up(now_ns)
        actions: Actions = []
        attempt = self._attempt
        if attempt is not None:
            if now_ns - attempt.sent_ns >= self._timing.resend_ns:
                actions += self._resend(attempt, now_ns)
            if attempt.snapshot is None and self._believe_absent(attempt, now_ns):
                actions += self._knowledge_grew(attempt, now_ns)
            if now_ns - attempt.progress_ns >= patience_ns(
                attempt, self._timing, self.view is not None
            ):
                actions += self._stalled(attempt, now_ns)
        elif self._reopen_ns is not None and now_ns >= self._reopen_ns:
            actions += self._open(False, "the attempt before did not end", now_ns)
        view = self.next_view
        resend_due = now_ns - self._synced_sent_ns >= self._timing.resend_ns
        if view is not None and self._self_synced and resend_due:
            self._synced_sent_ns = now_ns
            actions.append(self._synced_message(view))
        actions += self._give_up_unsynced(now_ns)
        actions += self._open_without_lost(now_ns)
        return actions + self._tell_active(now_ns) + self._meet(now_ns) + self._open_if_due(now_ns)

    def _open_without_lost(self, now_ns: int) -> Actions:
        """Somebody was lost just before the view with it in it was taken over, and is not back; or
        it keeps all from the next one."""
        view, settled_ns = self.view, self._taken_over_ns + self._timing.resend_ns
        if view is None or self.frozen or now_ns < settled_ns or self.me not in view.members:
            return []
        lost = sorted(self._suspects & set(view.members))
        names = ", ".join(member.peer_id for member in lost)
        return self._open(False, f"{names} did not come along", now_ns) if lost else []

    def _hear(self, sender: Member, now_ns: int) -> Actions:
        self._suspects.discard(sender)
        self.know(sender.peer_id)
        if self._attempt is not None:
            self._attempt.heard_ns[sender] = now_ns
        if sender.life == self._lives.get(sender.peer_id):
            return []
        if len(self._lives) >= 4 * MEMBERS_LIMIT:
            self._lives.clear()
        self._lives[sender.peer_id] = sender.life
        views = [view for view in (self.view, self.next_view) if view is not None]
        named = {member for view in views for member in view.members}
        actions: Actions = []
        for member in sorted(m for m in named if m.peer_id == sender.peer_id):
            if member.life < sender.life and member not in self._suspects:
                actions += self._on_evidence(member, "it has started again", now_ns)
        return actions

    def _receive_join_request(self, sender: str, message: JoinRequest, now_ns: int) -> Actions:
        view = self.view
        fellows = len(view.members) if view is not None else 0
        if len(message.record.payload) > NEWCOMER_RECORD_BYTES + LINK_BYTES * fellows:
            raise PeerFault(f"asks with a record of {len(message.record.payload)} bytes", sender)
        record = self._open_record(message.record)
        if record.peer_id != sender:
            raise PeerFault(f"asks for another peer, {record.peer_id}", sender)
        member = Member(record.peer_id, record.life)
        if record.life < self._lives.get(record.peer_id, 0):
            return []
        actions = self._hear(member, now_ns)
        if view is not None and member in view.members:
            return actions
        following = self.next_view
        if following is not None and member in following.members:
            if message.awaits == following.id:
                return actions
            self._drop_next = True
            if self._vouched is None:
                self._drop_next_view()
        if not self._newcomers.is_refused(record.peer_id, now_ns):
            bound = self._highest_number + NUMBERS_PASSED_LIMIT
            self._highest_number = max(self._highest_number, min(message.passed, bound))
        actions += self._tell_while_frozen(sender, now_ns)
        if not self._newcomers.ask(record, message.record, now_ns):
            return actions
        report = Report(f"{record.peer_id} asks to join")
        return [*actions, report, *self._open_if_due(now_ns)]

    def _tell_while_frozen(self, newcomer: str, now_ns: int) -> Actions:
        """That there is a view, whose members deal with a failure: it must make none of its own."""
        if self.view is None or not self.frozen or self.me not in self.view.members:
            return []
        return self._tell(newcomer, self._standing(self.view), now_ns)

    def _open_if_due(self, now_ns: int) -> Actions:
        if self._attempt is not None or self.next_view is not None:
            return []
        if self.view is None:
            return self._found_if_orphaned(now_ns)
        if self.frozen or now_ns < self._quiet_until_ns:
            return []
        planned = isinstance(self.view.plan, Plan)
        if self._newcomers.due(now_ns, self._timing.join_window_ns):
            return self._open(planned, f"{self._newcomers.count} join", now_ns)
        if self._replan_reason:
            return self._open(planned, self._replan_reason, now_ns)
        if self._awaits_new_plan:
            return self._open(True, "others stand in for a lost peer", now_ns)
        lost_since_ns = self._lost_since_ns
        if lost_since_ns is not None and now_ns - lost_since_ns >= self._timing.lost_layers_ns:
            self._accepts_loss = True
            return self._open(False, "goes back to an older state: layers are lost", now_ns)
        if self._intent is Intent.LEAVING:
            waits = is_waited_for(self.me.peer_id, self.view.snapshot, planned)
            if not waits or now_ns - self._taken_over_ns >= self._timing.lost_layers_ns:
                return self._open(planned, f"{self.me.peer_id} leaves", now_ns)
        return []

    def _found_if_orphaned(self, now_ns: int) -> Actions:
        if not self._wants_view or not self._timing.orphan_ns:
            return []
        if self._view_heard_ns is None:
            self._view_heard_ns = now_ns + self._prng.below(self._timing.resend_ns)
        if now_ns - self._view_heard_ns < self._timing.orphan_ns:
            return []
        self._view_heard_ns = now_ns + self._prng.below(self._timing.resend_ns)
        return self._open(False, "nobody is in a view", now_ns)


__all__ = [
    "LAN",
    "SECOND_NS",
    "WAN",
    "Action",
    "Actions",
    "Agreement",
    "ComputePlan",
    "Disagreed",
    "Left",
    "Rejoin",
    "Report",
    "SendMessage",
    "StopStep",
    "TakeOver",
    "Timing",
    "ViewAgreed",
]
