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
what each peer contributes decides whether it is rolled forward or repeated (`core.recovery`).

A number is given at most one Ready in a life, and an attempt with a higher number replaces a
lower one. `docs/decisions/0002-takeover-by-prepared.md` says why takeover is decided by Prepared.
"""

from p2p_dtfm.core.actions import (
    LAN,
    SECOND_NS,
    WAN,
    Action,
    Actions,
    ComputePlan,
    Halt,
    Left,
    Rejoin,
    Report,
    SendMessage,
    StopStep,
    TakeOver,
    Timing,
    ViewAgreed,
)
from p2p_dtfm.core.agreement_messages import (
    Active,
    AgreementMessage,
    Gather,
    Heartbeat,
    JoinRequest,
    Ready,
    Standing,
)
from p2p_dtfm.core.agreement_state import MEMBERS_LIMIT
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.gathering import Gathering
from p2p_dtfm.core.leaving import is_waited_for
from p2p_dtfm.core.ledger import STEPS_AHEAD_LIMIT
from p2p_dtfm.core.lineage import extend
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.records import Intent, PeerRecord
from p2p_dtfm.core.signed import Signed
from p2p_dtfm.core.snapshot import Member, ViewId
from p2p_dtfm.core.standing import outranks

NUMBERS_AHEAD_LIMIT = 4096
"""By so much a newcomer may raise the number of the next attempt."""


class Agreement(Gathering):
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

    def _join_request(self, record: Signed) -> JoinRequest:
        awaits = self.next_view.id if self.next_view is not None else None
        passed = max(self._readied_number, self._given_up_number)
        return JoinRequest(record, awaits, passed)

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
        if isinstance(message, JoinRequest):
            return self._receive_join_request(message, now_ns)
        if message.sender.peer_id != sender:
            raise PeerFault("speaks for another peer", sender)
        if message.sender.life < self._lives.get(sender, 0):
            return []
        actions = self._hear(message.sender, now_ns)
        if isinstance(message, Gather):
            return actions + self._receive_gather(message, now_ns)
        if isinstance(message, Ready):
            return actions + self._receive_ready(message, now_ns)
        if isinstance(message, Active):
            return actions + self._receive_active(message, now_ns)
        if isinstance(message, Standing):
            return actions + self._receive_standing(message, now_ns)
        if isinstance(message, Heartbeat):
            return actions + self._answer_outsider(message.sender, now_ns)
        return actions + self._receive_synced(message, now_ns)

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
            limit_ns = self._timing.ready_ns if attempt.snapshot else self._timing.gather_ns
            if now_ns - attempt.progress_ns >= limit_ns:
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
        """Somebody was lost just before the view with it in it was taken over, and is not back."""
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

    def _receive_join_request(self, message: JoinRequest, now_ns: int) -> Actions:
        record = self._open_record(message.record)
        member = Member(record.peer_id, record.life)
        if record.life < self._lives.get(record.peer_id, 0):
            return []
        actions = self._hear(member, now_ns)
        if self.view is not None and member in self.view.members:
            return actions
        following = self.next_view
        if following is not None and member in following.members:
            if message.awaits == following.id:
                return actions
            self._drop_next = True
            if self._vouched is None:
                self._drop_next_view()
        bound = self._highest_number + NUMBERS_AHEAD_LIMIT
        self._highest_number = max(self._highest_number, min(message.passed, bound))
        if self._newcomers.count >= MEMBERS_LIMIT:
            raise PeerFault("more newcomers than this swarm lets wait", record.peer_id)
        if not self._newcomers.ask(record, message.record, now_ns):
            return actions
        report = Report(f"{record.peer_id} asks to join")
        return [*actions, report, *self._open_if_due(now_ns)]

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

    def _receive_active(self, message: Active, now_ns: int) -> Actions:
        said = self._active_members.setdefault(message.view, set())
        said.add(message.sender)
        view, attempt, to = self.view, self._attempt, (message.sender.peer_id,)
        if view is not None and message.view == view.id:
            self._open_ledger()
            asked = message.asks and not self.frozen
            return [SendMessage(to, self._active)] if asked else []
        self._view_heard_ns = now_ns
        for number in sorted(self._active_members)[:-8]:
            del self._active_members[number]
        actions: Actions = []
        if attempt is not None and attempt.view_id == message.view:
            attempt.taken_over_elsewhere = True
            actions = self._check_ready(now_ns)
        for agreed in (self.next_view, self._dropped):
            if agreed is not None and agreed.id == message.view:
                present = agreed.snapshot.present if agreed.snapshot.planned else None
                if view is None or present is None or present.stage_of(self.me.peer_id) is None:
                    self._catch_up(message)
                    return [*actions, *self._take_over(agreed, now_ns)]
                return actions  # this peer commits the step before by itself, and takes over then
        last = self._last_ready
        if view is None and attempt is None and last is not None and last.view == message.view:
            return self._rejoin(f"had given up view {message.view}, which waits for this peer")
        return actions or self._missed(message.sender, message.view, now_ns)

    def _catch_up(self, message: Active) -> None:
        """Be where a view that others have taken over starts."""
        inventory, view = self.inventory, self.view
        step, lineage = inventory.step, inventory.lineage
        last = extend(lineage.digest, step, view.id) if view is not None else None
        if view is not None and (message.step, message.lineage) == (step + 1, last):
            inventory.committed_unseen(view.id)
        else:
            lineage.move_to(message.step, message.lineage)

    def _missed(self, sender: Member, theirs: ViewId, now_ns: int) -> Actions:
        """`sender` is in a later view than this peer, which counts this peer in."""
        view = self.view
        if view is None or sender not in view.members or theirs.number <= view.id.number:
            return []
        attempt = self._attempt
        if attempt is not None and not attempt.planned and attempt.number > theirs.number:
            return []
        self._highest_number = max(self._highest_number, theirs.number)
        self._attempt = None
        return self._open(False, f"missed the takeover of view {theirs}", now_ns)

    def _receive_standing(self, message: Standing, now_ns: int) -> Actions:
        view = self.view
        if view is None:
            return self._hear_of_view(message, now_ns)
        if message.view == view.id or self.me not in view.members:
            return []
        if self.me in message.members:
            return self._missed(message.sender, message.view, now_ns)
        if message.sender in view.members:
            attempt = self._attempt
            agreed = {view.id for view in (self.next_view, self._dropped) if view is not None}
            awaited = attempt is not None and attempt.view_id == message.view
            awaited |= message.view in agreed and message.step <= self.step + STEPS_AHEAD_LIMIT
            if awaited or message.view.number < view.id.number:
                return []  # a leaver that helped to agree on it learns of it by Active
            return self._rejoin(f"view {message.view} has succeeded {view.id} without this peer")
        if outranks(message, self._standing(view)):
            reason = f"view {message.view} of {message.sender.peer_id} counts"
            return self._rejoin(reason, isinstance(view.plan, Plan))
        return self._answer_outsider(message.sender, now_ns)

    def _hear_of_view(self, message: Standing, now_ns: int) -> Actions:
        """Newcomers never make a view of their own while there is one."""
        self._view_heard_ns = now_ns
        following = self.next_view
        if following is not None and message.view.number >= following.id.number:
            if message.view == following.id:
                return []
            self.next_view = None  # it was never taken over: they have gone another way
        if not self._wants_view or self._record is None or self.next_view is not None:
            return []
        attempt = self._attempt
        if attempt is not None and not attempt.only_newcomers:
            return []
        if attempt is not None:
            self._give_up(now_ns)
            self.frozen = False
        return self._tell(message.sender.peer_id, self._join_request(self._record), now_ns)

    def _meet(self, now_ns: int) -> Actions:
        view = self.view
        if view is None or self.frozen or self.me not in view.members:
            return []
        if now_ns - self._met_ns < self._timing.meet_ns:
            return []
        self._met_ns = now_ns
        outside = sorted(set(self._known_peers) - set(view.member_ids))
        return [SendMessage(tuple(outside), self._standing(view))] if outside else []


__all__ = [
    "LAN",
    "SECOND_NS",
    "WAN",
    "Action",
    "Actions",
    "Agreement",
    "ComputePlan",
    "Halt",
    "Left",
    "Rejoin",
    "Report",
    "SendMessage",
    "StopStep",
    "TakeOver",
    "Timing",
    "ViewAgreed",
]
