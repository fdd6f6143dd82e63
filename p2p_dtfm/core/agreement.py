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
    Accusation,
    Active,
    AgreementMessage,
    Contribution,
    Gather,
    Heartbeat,
    JoinRequest,
    PresentView,
    Ready,
    SavedState,
    Standing,
    Synced,
    open_contribution,
    sign_contribution,
)
from p2p_dtfm.core.attempt import Attempt
from p2p_dtfm.core.canonical import digest
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.inventory import Inventory, Restart
from p2p_dtfm.core.ledger import Ledger
from p2p_dtfm.core.lineage import extend
from p2p_dtfm.core.newcomers import Newcomers
from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.prng import prng_of_digest
from p2p_dtfm.core.records import Intent, PeerRecord, open_record
from p2p_dtfm.core.signed import Sign, Signed, Verify
from p2p_dtfm.core.snapshot import GENESIS, Member, Snapshot, ViewId
from p2p_dtfm.core.standing import outranks
from p2p_dtfm.core.step import StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.core.workload import Workload

MEMBERS_LIMIT = 1024
ROUNDS_LIMIT = 64
"""Rounds of Gather that may each start the deadline anew."""


class Agreement:
    """One peer's part in agreeing on views.

    `step` is the number of its committed steps, `held` the version of each layer whose state it
    has; the caller keeps `held` up to date.
    """

    def __init__(
        self,
        me: Member,
        run_digest: str,
        workload: Workload,
        signer: Sign,
        verify: Verify,
        timing: Timing | None = None,
    ) -> None:
        self.me = me
        self.view: View | None = None
        self.next_view: View | None = None
        self.ledger: Ledger | None = None
        self.frozen = False
        """An unplanned view change is under way: no step commits."""
        self.inventory = Inventory()
        self._run_digest = run_digest
        self._workload = workload
        self._signer = signer
        self._verify = verify
        self._timing = timing or Timing()
        self._record: Signed | None = None
        self._intent = Intent.TRAIN
        self._records: dict[Signed, PeerRecord] = {}
        self._lives: dict[str, int] = {}
        self._known_peers: dict[str, None] = {}
        self._last_tick_ns: int | None = None
        self._taken_over_ns = 0
        self._accepts_loss = False
        self._newcomers = Newcomers()
        self._begin(me)

    def _begin(self, me: Member) -> None:
        """A new life keeps no promise of the one before."""
        self.me = me
        self.view = self.next_view = self.ledger = None
        self.frozen = False
        self._outside = False
        self._attempt: Attempt | None = None
        self._wants_view = False
        self._replan_reason = ""
        self._replan_number = 0
        self._last_ready: Ready | None = None
        self._active = Active(me, GENESIS, 0)
        self._highest_number = 0
        self._readied_number = 0
        self._given_up_number = 0
        self._synced: set[Member] = set()
        self._self_synced = False
        self._synced_sent_ns = 0
        self._vouched: ViewId | None = None
        self._drop_next = False
        self._dropped: View | None = None
        self._quiet_until_ns = 0
        self._suspects: set[Member] = set()
        self._active_members: dict[ViewId, set[Member]] = {}
        self._active_sent_ns = 0
        self._told_ns: dict[str, int] = {}
        self._met_ns = 0
        self._failures = 0
        self._reopen_ns: int | None = None
        self._view_heard_ns: int | None = None
        self._prng = prng_of_digest(digest((me.peer_id, me.life)))

    # what the caller tells ------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.inventory.step

    @step.setter
    def step(self, step: int) -> None:
        """Start from a checkpoint whose lineage is not known; see `resume`."""
        self.resume(step, self.held, extend("", step, GENESIS) if step else "")

    @property
    def held(self) -> dict[int, int]:
        return self.inventory.held

    @held.setter
    def held(self, held: dict[int, int]) -> None:
        self.inventory.held = dict(held)

    def resume(
        self, step: int, held: dict[int, int], lineage: str, saved: tuple[SavedState, ...] = ()
    ) -> None:
        """Start from what is on disk."""
        self.inventory.lineage.move_to(step, lineage)
        self.inventory.held = dict(held)
        self.inventory.saved = saved

    def set_record(self, record: PeerRecord, signed: Signed) -> None:
        """This peer's newest record; it counts from the next view on."""
        assert record.peer_id == signed.peer_id == self.me.peer_id
        assert record.life == self.me.life
        self._record = signed
        self._intent = record.intent

    def begin_life(self, record: PeerRecord, signed: Signed) -> JoinRequest:
        """After `Rejoin`: be a newcomer, with a higher life."""
        assert record.life > self.me.life
        self._begin(Member(record.peer_id, record.life))
        self.set_record(record, signed)
        return self.wants_view()

    def know(self, peer_id: str) -> None:
        """A peer of this run that may be in another view, such as one found in the directory."""
        if peer_id != self.me.peer_id:
            self._known_peers[peer_id] = None
            if len(self._known_peers) > MEMBERS_LIMIT:
                del self._known_peers[next(iter(self._known_peers))]

    def found(self, now_ns: int) -> Actions:
        """Make the first view, of this peer and the newcomers that asked so far."""
        assert self._record is not None and self.view is None
        self._wants_view = True
        return self._open(False, "founding", now_ns)

    def wants_view(self) -> JoinRequest:
        """Become a newcomer that may be let in; the caller sends the request to other peers."""
        assert self._record is not None and self.view is None
        self._wants_view = True
        return JoinRequest(self._record)

    def request_replan(self, reason: str, now_ns: int) -> Actions:
        """Ask for a view with the newest records, as when leaving or after a change of speed."""
        self._replan_reason = reason
        self._replan_number = 0
        return self.tick(now_ns)

    def suspect(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """Evidence that this peer cannot reach `peer_id`; hearing from it takes it back."""
        named: set[Member] = set(self.view.members) if self.view else set()
        if self.next_view is not None:
            named |= set(self.next_view.snapshot.contributors)
        if self._attempt is not None:
            named |= self._attempt.universe
        actions: Actions = []
        for member in sorted(named):
            new = member not in self._suspects and member != self.me
            if member.peer_id == peer_id and new and not self._outside:
                actions += self._on_evidence(member, reason, now_ns)
        return actions

    def reduced(self, step: int, layers: set[int]) -> None:
        """The reduced gradients of `step` for `layers` are here, as a holder or as a follower.

        The caller keeps them until a later step has committed.
        """
        if self.view is not None and not self.frozen:
            self.inventory.reduced(self.view.id, step, layers)

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

    def plan_computed(self, snapshot: Snapshot, plan: Plan | NoPlan, now_ns: int) -> Actions:
        """The result of `ComputePlan`."""
        attempt = self._attempt
        if attempt is None or attempt.snapshot is not snapshot or attempt.plan is not None:
            return []
        attempt.plan = plan
        attempt.progress_ns = now_ns
        self._readied_number = max(self._readied_number, attempt.number)
        assert attempt.view_id is not None
        mine = Ready(self.me, attempt.view_id, plan.digest())
        attempt.ready[self.me] = mine
        self._last_ready = mine
        return [SendMessage(attempt.others, mine), *self._check_ready(now_ns)]

    def synced(self, view: ViewId) -> Actions:
        """This peer has, or follows, what its place in the agreed view needs."""
        if self.next_view is None or self.next_view.id != view or self._self_synced:
            return []
        self._self_synced = True
        self._synced.add(self.me)
        return [self._synced_message(self.next_view)]

    @property
    def ready_for(self) -> ViewId | None:
        """What this peer's Prepared must say: the next view, if all its members are synced.

        Reading it is a promise: the next view stays until the step under way commits.
        """
        view = self.next_view
        if view is None or self._drop_next or not self._all_synced(view):
            return None
        self._vouched = view.id
        return view.id

    def committed(self, outcome: StepOutcome, now_ns: int = 0) -> Actions:
        """The ledger gave an outcome: the step is committed, whether or not it is applied yet.

        Call this before anything else is received or awaited.
        """
        assert self.view is not None and not self.frozen
        self.inventory.committed(self.view.id, outcome, self.view.layers_of(self.me.peer_id))
        self._failures = 0
        self._vouched = None
        view = self.next_view
        if outcome.take_over is None or view is None or view.id != outcome.take_over:
            if self._drop_next:
                self._drop_next_view()
            return []
        return self._take_over(view, now_ns or self._taken_over_ns)

    def skip_to(self, step: int) -> None:
        """Without a stage: somebody prepares `step` of this view, so all before it committed."""
        view, ledger = self.view, self.ledger
        assert view is not None and ledger is not None and not view.layers_of(self.me.peer_id)
        if not self.frozen and ledger.step < step:
            for skipped in range(ledger.step, step):
                self.inventory.lineage.committed(skipped, view.id)
            ledger.skip_to(step)

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
        return actions + self._tell_active(now_ns) + self._meet(now_ns) + self._open_if_due(now_ns)

    @property
    def attempting(self) -> bool:
        return self._attempt is not None

    @property
    def joiners(self) -> tuple[str, ...]:
        """Newcomers that wait to be let in."""
        return self._newcomers.waiting

    # evidence -----------------------------------------------------------------------------------

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
        if self.view is None:
            return []
        older = [m for m in self.view.members if m.peer_id == sender.peer_id and m != sender]
        actions: Actions = []
        for member in older:
            if member.life < sender.life and member not in self._suspects:
                actions += self._on_evidence(member, "it has started again", now_ns)
        return actions

    def _on_evidence(self, member: Member, reason: str, now_ns: int) -> Actions:
        self._suspects.add(member)
        attempt = self._attempt
        text = f"cannot reach {member.peer_id}: {reason}"
        if attempt is not None and not attempt.planned:
            if attempt.snapshot is None:
                return [Report(text), *self._accuse(attempt, [member], now_ns)]
            if member in attempt.snapshot.contributors and member not in attempt.ready:
                return [Report(text), *self._reopen(text, now_ns)]
            return [Report(text)]
        if self.view is not None and member in self.view.members:
            if self.frozen:
                return [Report(text)]
            return self._open(False, text, now_ns)
        if attempt is not None and member in attempt.universe:
            self._give_up(now_ns)
        if self.next_view is not None and member in self.next_view.members:
            self._drop_next = True
            if self._vouched is None:
                self._drop_next_view()
        self._newcomers.forget(member.peer_id)
        return [Report(text)]

    def _accuse(self, attempt: Attempt, members: list[Member], now_ns: int) -> Actions:
        new = {Accusation(self.me, member) for member in members} - attempt.accusations
        attempt.accusations |= new
        return self._knowledge_grew(attempt, now_ns) if new else []

    def _drop_next_view(self) -> None:
        self._dropped, self.next_view = self.next_view, None
        self._drop_next = False
        self._self_synced = False

    def _wake_up(self, now_ns: int) -> None:
        """After a sleep, deadlines move: this peer has not listened, and judges nobody."""
        gap_ns = now_ns - (now_ns if self._last_tick_ns is None else self._last_tick_ns)
        self._last_tick_ns = now_ns
        if gap_ns > self._timing.sleep_ns:
            if self._attempt is not None:
                self._attempt.progress_ns += gap_ns
            if self._reopen_ns is not None:
                self._reopen_ns += gap_ns
            if self._view_heard_ns is not None:
                self._view_heard_ns += gap_ns
            self._taken_over_ns += gap_ns

    # opening an attempt -----------------------------------------------------------------------

    def _receive_join_request(self, message: JoinRequest, now_ns: int) -> Actions:
        record = self._open_record(message.record)
        member = Member(record.peer_id, record.life)
        if record.life < self._lives.get(record.peer_id, 0):
            return []
        actions = self._hear(member, now_ns)
        if self.view is not None and member in self.view.members:
            return actions
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
        waited_ns = now_ns - self._taken_over_ns
        if self.view.snapshot.lost_layers and waited_ns >= self._timing.lost_layers_ns:
            self._accepts_loss = True
            return self._open(False, "goes back to an older state: layers are lost", now_ns)
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

    def _open(self, planned: bool, reason: str, now_ns: int) -> Actions:
        number = max(
            self._highest_number,
            self._readied_number,
            self._given_up_number,
            self.view.id.number if self.view else 0,
        )
        number += 1 if (number % 2 == 0) != planned else 2
        report = Report(f"opens view {number}: {reason}")
        return [report, *self._enter(number, planned, self._base(planned), now_ns, grew=True)]

    def _base(self, planned: bool) -> ViewId:
        return self.view.id if planned and self.view is not None else GENESIS

    def _enter(
        self, number: int, planned: bool, base: ViewId, now_ns: int, grew: bool = False
    ) -> Actions:
        assert self._record is not None
        assert number > max(self._readied_number, self._given_up_number)
        self._highest_number = max(self._highest_number, number)
        if self._replan_reason:
            self._replan_number = number
        self._dropped = self.next_view = None
        self._self_synced = self._drop_next = False
        self._synced = set()
        self._reopen_ns = None
        actions: Actions = []
        if planned and self.view is None:
            self.frozen = False  # a newcomer has nothing under way that an attempt could freeze
        if not planned and not self.frozen:
            self.frozen = True
            self.inventory.freeze(self.ledger)
            if self.view is not None:
                actions.append(StopStep())
        attempt = Attempt(
            self.me, number, planned, base, self._workload.layer_count, now_ns, sent_ns=now_ns
        )
        self._attempt = attempt
        inventory = self.inventory
        mine = Contribution(
            member=self.me,
            number=number,
            record=self._record,
            present=self._present_view(),
            step=self.step,
            held=dict(inventory.held),
            joiners=self._newcomers.records,
            lineages=inventory.lineages(),
            saved=inventory.saved,
            pending=inventory.pending(self.view.id) if self.view and not planned else None,
            retained=inventory.retained,
            accepts_loss=self._accepts_loss,
        )
        attempt.add(sign_contribution(mine, self._signer), mine, self._open_record)
        attempt.accusations = {Accusation(self.me, member) for member in self._suspects}
        return actions + (self._knowledge_grew(attempt, now_ns) if grew else [])

    def _present_view(self) -> PresentView | None:
        if self.view is None:
            return None
        plan = self.view.plan if isinstance(self.view.plan, Plan) else None
        return PresentView(self.view.id, self.view.members, plan)

    def _reopen(self, reason: str, now_ns: int) -> Actions:
        """An unplanned attempt has failed: again with a higher number, later each time."""
        self._attempt = None
        self._failures += 1
        if self._failures == 1:
            return self._open(False, reason, now_ns)
        limit_ns = self._timing.backoff_limit_ns
        delay_ns = min(limit_ns, self._timing.backoff_ns << min(self._failures - 2, 16))
        self._reopen_ns = now_ns + delay_ns // 2 + delay_ns * self._prng.below(1024) // 2048
        return [Report(f"will try again: {reason}")]

    def _give_up(self, now_ns: int) -> None:
        """For good: rounds of a number that were said once must not begin anew."""
        if self._attempt is not None:
            self._given_up_number = max(self._given_up_number, self._attempt.number)
        self._attempt = None
        self._quiet_until_ns = now_ns + self._timing.retry_ns

    # Gather -----------------------------------------------------------------------------------

    def _receive_gather(self, message: Gather, now_ns: int) -> Actions:
        contributions = self._open_contributions(message)
        attempt = self._attempt
        if attempt is None or message.number != attempt.number:
            if attempt is None and self._repeats_last(message):
                assert self._last_ready is not None
                return [SendMessage((message.sender.peer_id,), self._last_ready)]
            opened = [contribution for _, contribution in contributions.values()]
            if not self._may_enter(message, opened):
                return self._stays_out(message, opened, now_ns)
            actions = self._enter(message.number, message.planned, message.base, now_ns)
            attempt = self._attempt
            assert attempt is not None
            attempt.heard_ns[message.sender] = now_ns
        else:
            actions = []
            if (message.planned, message.base) != (attempt.planned, attempt.base):
                return []
        return actions + self._merge(attempt, message, contributions, now_ns)

    def _merge(
        self,
        attempt: Attempt,
        message: Gather,
        contributions: dict[Member, tuple[Signed, Contribution]],
        now_ns: int,
    ) -> Actions:
        held = attempt.digests.get(message.sender, (0, ""))
        if message.round >= held[0]:
            attempt.digests[message.sender] = (message.round, message.digest)
        if attempt.snapshot is not None:
            moved_on = message.round > held[0] and message.digest != attempt.snapshot.knowledge
            waited_for = message.sender in attempt.snapshot.contributors
            if moved_on and waited_for and message.sender not in attempt.ready:
                return self._failed(attempt, f"{message.sender.peer_id} knows more", now_ns)
            return []
        grew = attempt.round == 0
        for member, (signed, contribution) in contributions.items():
            if member not in attempt.known and self._is_welcome(contribution, attempt):
                attempt.add(signed, contribution, self._open_record)
                grew = True
        grew |= attempt.learn(message)
        if grew:
            return self._knowledge_grew(attempt, now_ns)
        return self._check_settled(attempt, now_ns)

    def _repeats_last(self, message: Gather) -> bool:
        """The sender still gathers what this peer has agreed to: its Ready must have got lost."""
        last = self._last_ready
        if last is None or last.view.number != message.number:
            return False
        return self.view is None or self.view.id.number < message.number

    def _open_contributions(self, message: Gather) -> dict[Member, tuple[Signed, Contribution]]:
        if len(message.contributions) > MEMBERS_LIMIT or len(message.absent) > MEMBERS_LIMIT:
            raise PeerFault("Gather with too many contributions", message.sender.peer_id)
        if len(message.accusations) > MEMBERS_LIMIT**2:
            raise PeerFault("Gather with too many accusations", message.sender.peer_id)
        attempt = self._attempt
        held = {} if attempt is None else {s: attempt.opened[m] for m, s in attempt.known.items()}
        contributions = {}
        for signed in message.contributions:
            contribution = held.get(signed) or self._open_contribution(signed, message.number)
            contributions[contribution.member] = (signed, contribution)
        return contributions

    def _open_contribution(self, signed: Signed, number: int) -> Contribution:
        contribution = open_contribution(signed, self._verify)
        owners = {signed.peer_id, contribution.member.peer_id, contribution.record.peer_id}
        if len(owners) > 1:
            raise PeerFault("a contribution that mixes several peers", signed.peer_id)
        if contribution.number != number:
            raise PeerFault("a contribution to another view", signed.peer_id)
        if self._open_record(contribution.record).life != contribution.member.life:
            raise PeerFault("a contribution with a record of another life", signed.peer_id)
        return contribution

    def _open_record(self, signed: Signed) -> PeerRecord:
        record = self._records.get(signed)
        if record is None:
            record = open_record(signed, self._run_digest, self._verify)
            if len(self._records) >= 4 * MEMBERS_LIMIT:
                self._records.clear()
            self._records[signed] = record
        return record

    def _may_enter(self, message: Gather, parts: list[Contribution]) -> bool:
        passed = max(self._readied_number, self._given_up_number)
        if self._record is None or message.number <= passed:
            return False
        attempt = self._attempt
        if attempt is not None and message.number < attempt.number:
            return False
        joiners = [self._open_record(signed) for part in parts for signed in part.joiners]
        asked = any(Member(r.peer_id, r.life) == self.me for r in joiners)
        present = [part.present for part in parts if part.present is not None]
        counted = [item for item in present if self.me in item.members]
        if self.view is None and message.planned and counted:
            return False  # where the base counts this peer in already, it must take that over first
        if self.view is None and self.next_view is not None:
            return message.planned and message.base == self.next_view.snapshot.previous
        if self.view is None:
            known = asked or any(part.member == self.me for part in parts)
            return self._wants_view and known
        if message.planned:
            vouched = self._vouched is not None
            return message.base == self.view.id and not self.frozen and not vouched
        if message.number <= self.view.id.number:
            return False
        succeeds = any(item.view.number > self.view.id.number for item in counted)
        return bool(counted) and (message.sender in self.view.members or succeeds)

    def _stays_out(self, message: Gather, parts: list[Contribution], now_ns: int) -> Actions:
        """Not for this peer: tell the sender what it does not know."""
        to, view, attempt = (message.sender.peer_id,), self.view, self._attempt
        if view is None:
            if any(part.present is not None for part in parts):
                self._view_heard_ns = now_ns
            return []
        if message.sender not in view.members:
            return self._answer_outsider(message.sender, now_ns)
        if message.number <= view.id.number:
            return [] if self.frozen else [SendMessage(to, self._active)]
        if message.planned:
            return []
        if attempt is not None and not attempt.planned:
            return [SendMessage(to, attempt.gather())] if message.number < attempt.number else []
        own = [part for part in parts if part.member == message.sender]
        if self.frozen or not own or own[0].present is None or own[0].present.view != view.id:
            return []
        # A failure, under a number that this peer has passed: unplanned outranks planned.
        return self._open(False, f"{message.sender.peer_id} reports a failure", now_ns)

    def _is_welcome(self, contribution: Contribution, attempt: Attempt) -> bool:
        if not attempt.planned or contribution.present is None:
            return True
        return contribution.present.view == attempt.base

    def _knowledge_grew(self, attempt: Attempt, now_ns: int) -> Actions:
        attempt.round += 1
        attempt.sent_ns = now_ns
        if attempt.round <= ROUNDS_LIMIT:
            attempt.progress_ns = now_ns
        attempt.digests[self.me] = (attempt.round, attempt.digest)
        said = SendMessage(attempt.others, attempt.gather())
        return [said, *self._check_settled(attempt, now_ns)]

    def _check_settled(self, attempt: Attempt, now_ns: int) -> Actions:
        if attempt.snapshot is not None or attempt.waits_for:
            return []
        if self.me not in attempt.participants:
            return self._excluded(attempt, now_ns)
        if not attempt.settled or (attempt.planned and attempt.only_newcomers):
            return []  # newcomers alone never make a planned view
        snapshot = attempt.freeze(self._run_digest, self._workload, self._open_record)
        attempt.progress_ns = now_ns
        for member in attempt.universe - set(attempt.participants):
            self._newcomers.refuse(member.peer_id, now_ns)
        if snapshot.lost_layers:
            names = ", ".join(str(layer) for layer in snapshot.lost_layers)
            reason = f"no member holds layers {names} any more; waits for a peer that does"
            return self.plan_computed(snapshot, NoPlan(reason), now_ns)
        return [ComputePlan(snapshot)]

    def _excluded(self, attempt: Attempt, now_ns: int) -> Actions:
        if self.view is not None and not attempt.planned:
            return []  # the others will say that they have gone on, or the attempt stalls
        self._give_up(now_ns)
        if self.view is None:
            self.frozen = False
        return [Report(f"was not heard in time for view {attempt.number}; asks again")]

    # Ready ------------------------------------------------------------------------------------

    def _receive_ready(self, message: Ready, now_ns: int) -> Actions:
        attempt = self._attempt
        if attempt is None or message.view.number != attempt.number:
            return []
        if message.sender not in attempt.ready:
            attempt.progress_ns = now_ns
        attempt.ready[message.sender] = message
        return self._check_ready(now_ns)

    def _check_ready(self, now_ns: int) -> Actions:
        attempt = self._attempt
        if attempt is None or attempt.snapshot is None or attempt.plan is None:
            return []
        mine = attempt.ready[self.me]
        answers = [attempt.ready.get(member) for member in attempt.snapshot.contributors]
        for theirs in answers:
            if theirs is None or theirs.view != mine.view:
                continue
            if theirs.plan_digest != mine.plan_digest:
                reason = (
                    f"{theirs.sender.peer_id} planned snapshot {mine.view.snapshot[:12]} as "
                    f"{theirs.plan_digest[:12]}, this peer as {mine.plan_digest[:12]}"
                )
                return [Halt(reason, attempt.snapshot)]
        if not attempt.taken_over_elsewhere:
            if None in answers:
                return []
            if any(theirs is not None and theirs.view != mine.view for theirs in answers):
                return self._failed(attempt, "members know different things", now_ns)
        view = View(attempt.snapshot, attempt.plan)
        if not attempt.planned:
            return [ViewAgreed(view), *self._take_over(view, now_ns)]
        self._attempt = None
        self.next_view = view
        self._synced = set()
        self._self_synced = False
        new = self.view is None
        if new:
            self.held = {}
        return [ViewAgreed(view, discard=new)]

    # Synced and takeover ------------------------------------------------------------------------

    def _receive_synced(self, message: Synced, now_ns: int) -> Actions:
        if self.next_view is not None and message.view == self.next_view.id:
            self._synced.add(message.sender)
            return []
        view = self.view
        if view is not None and message.view == view.id and message.sender in view.members:
            # It has not taken over yet, so this peer's Active has not reached it.
            return [SendMessage((message.sender.peer_id,), self._active)]
        return []

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
                present = agreed.snapshot.present
                if view is None or present is None or present.stage_of(self.me.peer_id) is None:
                    self.inventory.lineage.move_to(message.step, message.lineage)
                    return [*actions, *self._take_over(agreed, now_ns)]
                return actions  # this peer commits the step before by itself, and takes over then
        last = self._last_ready
        if view is None and attempt is None and last is not None and last.view == message.view:
            return self._rejoin(f"had given up view {message.view}, which waits for this peer")
        return actions or self._missed(message.sender, message.view, now_ns)

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

    def _synced_message(self, view: View) -> SendMessage:
        return SendMessage(self._contributors(view), Synced(self.me, view.id))

    def _contributors(self, view: View) -> tuple[str, ...]:
        names = (member.peer_id for member in view.snapshot.contributors)
        return tuple(sorted(peer_id for peer_id in names if peer_id != self.me.peer_id))

    def _all_synced(self, view: View) -> bool:
        return all(member in self._synced for member in view.members)

    def _take_over(self, view: View, now_ns: int) -> Actions:
        """An unplanned view starts where its contributions lead, a planned one at this step."""
        restart: Restart | None = None
        attempt = self._attempt
        if not view.snapshot.planned:
            assert attempt is not None and attempt.recovery is not None
            if attempt.recovery.target is not None:
                restart = self.inventory.restart(self.me, attempt.recovery)
        if self._replan_number and view.id.number >= self._replan_number:
            self._replan_reason = ""
        early = self._active_members.get(view.id, set())
        self.next_view = self._attempt = self._dropped = self._reopen_ns = self._vouched = None
        self._self_synced = self._drop_next = self.frozen = self._accepts_loss = False
        self._synced, self._records = set(), {}
        self._active_members = {view.id: {self.me} | early}
        self.view, self._taken_over_ns = view, now_ns
        self._suspects &= set(view.members)
        self._active = Active(self.me, view.id, self.step, self.inventory.lineage.digest)
        self._newcomers.let_in(view.member_ids)
        for peer_id in view.member_ids:
            self.know(peer_id)
        plan = view.plan
        self.ledger = Ledger(view.id, plan, self.step) if isinstance(plan, Plan) else None
        self._open_ledger()
        said = SendMessage(self._contributors(view), self._active)
        if self.me not in view.members:
            return [said, Left()]
        self._met_ns = now_ns
        told = [SendMessage((m.peer_id,), self._standing(view)) for m in view.snapshot.absent]
        return [said, *told, TakeOver(view, self.step, self.ledger, restart)]

    def _open_ledger(self) -> None:
        if self.ledger is not None and self.view is not None:
            active = self._active_members.get(self.view.id, set())
            self.ledger.may_commit = all(member in active for member in self.view.members)

    # peers in other views -----------------------------------------------------------------------

    def _standing(self, view: View) -> Standing:
        return Standing(self.me, view.id, view.members, isinstance(view.plan, Plan), self.step)

    def _receive_standing(self, message: Standing, now_ns: int) -> Actions:
        view = self.view
        if view is None:
            return self._hear_of_view(message, now_ns)
        if message.view == view.id or self.me not in view.members:
            return []
        if self.me in message.members:
            return self._missed(message.sender, message.view, now_ns)
        if message.sender in view.members:
            if message.view.number < view.id.number:
                return []
            return self._rejoin(f"view {message.view} has succeeded {view.id} without this peer")
        if outranks(message, self._standing(view)):
            return self._rejoin(f"view {message.view} of {message.sender.peer_id} counts")
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
        return self._tell(message.sender.peer_id, JoinRequest(self._record), now_ns)

    def _rejoin(self, reason: str) -> Actions:
        self._outside = True
        self.frozen = True
        self._attempt = self.next_view = None
        self.inventory.freeze(self.ledger)
        return [StopStep(), Rejoin(reason)]

    def _answer_outsider(self, sender: Member, now_ns: int) -> Actions:
        view = self.view
        if view is None or self.frozen or sender in view.members or self.me not in view.members:
            return []
        return self._tell(sender.peer_id, self._standing(view), now_ns)

    def _tell(self, peer_id: str, message: AgreementMessage, now_ns: int) -> Actions:
        """At most one such message to a peer in each resend interval."""
        if now_ns - self._told_ns.get(peer_id, -self._timing.resend_ns) < self._timing.resend_ns:
            return []
        if len(self._told_ns) >= 4 * MEMBERS_LIMIT:
            self._told_ns.clear()
        self._told_ns[peer_id] = now_ns
        return [SendMessage((peer_id,), message)]

    def _meet(self, now_ns: int) -> Actions:
        view = self.view
        if view is None or self.frozen or self.me not in view.members:
            return []
        if now_ns - self._met_ns < self._timing.meet_ns:
            return []
        self._met_ns = now_ns
        outside = sorted(set(self._known_peers) - set(view.member_ids))
        return [SendMessage(tuple(outside), self._standing(view))] if outside else []

    # time ---------------------------------------------------------------------------------------

    def _tell_active(self, now_ns: int) -> Actions:
        view = self.view
        if view is None or self.frozen or self.me not in view.members:
            return []
        missing = set(view.members) - self._active_members.get(view.id, set())
        if not missing or now_ns - self._active_sent_ns < self._timing.resend_ns:
            return []
        self._active_sent_ns = now_ns
        asking = Active(self.me, view.id, self._active.step, self._active.lineage, asks=True)
        return [SendMessage(tuple(sorted(m.peer_id for m in missing)), asking)]

    def _resend(self, attempt: Attempt, now_ns: int) -> Actions:
        attempt.sent_ns = now_ns
        actions: Actions = [SendMessage(attempt.others, attempt.gather())]
        if self.me in attempt.ready:
            actions.append(SendMessage(attempt.others, attempt.ready[self.me]))
        return actions

    def _failed(self, attempt: Attempt, reason: str, now_ns: int) -> Actions:
        """A frozen attempt cannot end any more; only a higher number ends it for everyone."""
        if not attempt.planned:
            return self._reopen(reason, now_ns)
        self._give_up(now_ns)
        if self.view is not None:
            return self._open(True, reason, now_ns)
        return [Report(f"gives up view {attempt.number}: {reason}")]

    def _stalled(self, attempt: Attempt, now_ns: int) -> Actions:
        waits_for = attempt.waits_for
        if attempt.snapshot is None and waits_for:
            members = {m for p in attempt.opened.values() if p.present for m in p.present.members}
            if not attempt.planned or not waits_for & members:
                return self._go_on_without(attempt, waits_for, now_ns)
        due = attempt.snapshot.contributors if attempt.snapshot else attempt.participants
        mine = attempt.digests[self.me][1]
        silent = [
            member
            for member in due
            if member != self.me
            and attempt.heard_ns.get(member, -1) < attempt.progress_ns
            and member not in attempt.ready
            and (attempt.snapshot or Accusation(self.me, member) not in attempt.accusations)
            and attempt.digests.get(member, (0, ""))[1] != (mine if not attempt.snapshot else "")
        ]
        names = ", ".join(sorted(m.peer_id for m in waits_for or silent)) or "all alike"
        reason = f"view {attempt.number} had no answer from {names}"
        if attempt.planned:
            report = Report(f"gives up: {reason}")
            if attempt.snapshot is not None:
                return [report, *self._failed(attempt, reason, now_ns)]
            self._give_up(now_ns)
            return [report]
        if attempt.snapshot is None and silent:
            self._suspects |= set(silent)
            return [Report(reason), *self._accuse(attempt, silent, now_ns)]
        self._suspects |= set(silent)
        if self.view is None:
            self._give_up(now_ns)
            self.frozen = False
            return [Report(f"gives up: {reason}")]
        return self._reopen(reason, now_ns)

    def _go_on_without(self, attempt: Attempt, silent: set[Member], now_ns: int) -> Actions:
        attempt.absent |= silent
        for member in silent:
            self._newcomers.forget(member.peer_id)
        names = ", ".join(sorted(member.peer_id for member in silent))
        report = Report(f"goes on without {names}: silent during Gather({attempt.number})")
        return [report, *self._knowledge_grew(attempt, now_ns)]


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
