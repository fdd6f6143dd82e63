"""Leaderless agreement on a view: Gather until all know the same, say Ready, then take over.

A sans-I/O state machine. Inputs are its methods; each returns the actions that the caller must
carry out. Time is the `now_ns` of each input, and planning, which may take long, is an action
whose result comes back as an input.

    Gather   everyone's contribution is flooded until all digests of the knowledge are equal
    Ready    the knowledge is frozen and planned; Ready from every contributor makes a view agreed
    Synced   each member of the agreed view has the state that its place needs, or follows it
    takeover where steps are under way: after the first step whose every Prepared says that all
             are synced; otherwise as soon as all are synced. Who takes over says Active, from
             which those without a stage in the view before learn it

A number is given at most one Ready in a life, and an attempt with a higher number replaces a
lower one. `docs/decisions/0002-takeover-by-prepared.md` says why takeover is decided by Prepared.
"""

from dataclasses import dataclass, field

from p2p_dtfm.core.agreement_messages import (
    Active,
    AgreementMessage,
    Contribution,
    Gather,
    JoinRequest,
    PresentView,
    Ready,
    Synced,
    knowledge_digest,
    open_contribution,
    sign_contribution,
)
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.records import Intent, PeerRecord, open_record
from p2p_dtfm.core.signed import Sign, Signed, Verify
from p2p_dtfm.core.snapshot import GENESIS, HeldLayer, Member, Snapshot, ViewId, sorted_records
from p2p_dtfm.core.step import StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.core.workload import Workload

MEMBERS_LIMIT = 1024
SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Timing:
    """How long each part may take without progress."""

    join_window_ns: int = SECOND_NS // 2
    """Newcomers that ask within this time of one another are let in together."""
    resend_ns: int = SECOND_NS
    gather_ns: int = 6 * SECOND_NS
    ready_ns: int = 120 * SECOND_NS
    retry_ns: int = 3 * SECOND_NS


@dataclass(frozen=True)
class SendMessage:
    to: tuple[str, ...]
    message: AgreementMessage


@dataclass(frozen=True)
class ComputePlan:
    """Plan this snapshot and give the result to `plan_computed`."""

    snapshot: Snapshot


@dataclass(frozen=True)
class ViewAgreed:
    """Bring the state that the view asks of this peer, then call `synced`."""

    view: View


@dataclass(frozen=True)
class TakeOver:
    """From `step` on, steps happen in `view`."""

    view: View
    step: int


@dataclass(frozen=True)
class Left:
    """The others went on without this peer, as it asked."""


@dataclass(frozen=True)
class Report:
    """A change worth a line in the log."""

    text: str


@dataclass(frozen=True)
class Halt:
    """The protocol is broken: two peers planned one snapshot differently."""

    reason: str
    snapshot: Snapshot


Action = SendMessage | ComputePlan | ViewAgreed | TakeOver | Left | Report | Halt
Actions = list[Action]


@dataclass
class _Attempt:
    number: int
    planned: bool
    base: ViewId
    progress_ns: int
    sent_ns: int
    round: int = 0
    known: dict[Member, Signed] = field(default_factory=dict)
    opened: dict[Member, Contribution] = field(default_factory=dict)
    absent: set[Member] = field(default_factory=set)
    digests: dict[Member, tuple[int, str]] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    plan: Plan | NoPlan | None = None
    ready: dict[Member, Ready] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return knowledge_digest(self.number, self.known, self.absent)


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
        self.step = 0
        self.held: dict[int, int] = {}
        self._run_digest = run_digest
        self._workload = workload
        self._signer = signer
        self._verify = verify
        self._timing = timing or Timing()
        self._record: Signed | None = None
        self._intent = Intent.TRAIN
        self._attempt: _Attempt | None = None
        self._joiners: dict[str, Signed] = {}
        self._first_request_ns = 0
        self._wants_view = False
        self._replan_reason = ""
        self._replan_number = 0
        self._last_ready: Ready | None = None
        self._active = Active(me, GENESIS, 0)
        self._records: dict[Signed, PeerRecord] = {}
        self._highest_number = 0
        self._readied_number = 0
        self._synced: set[Member] = set()
        self._self_synced = False
        self._synced_sent_ns = 0
        self._quiet_until_ns = 0

    # what the caller tells ------------------------------------------------------------------

    def set_record(self, record: PeerRecord, signed: Signed) -> None:
        """This peer's newest record; it counts from the next view on."""
        assert record.peer_id == signed.peer_id == self.me.peer_id
        assert record.life == self.me.life
        self._record = signed
        self._intent = record.intent

    def found(self, now_ns: int) -> Actions:
        """Make the first view, of this peer and the newcomers that asked so far."""
        assert self._record is not None and self.view is None
        self._wants_view = True
        return self._open(False, "founding", now_ns)

    def wants_view(self) -> JoinRequest:
        """Become a newcomer that may be let in; the caller sends the request to a member."""
        assert self._record is not None and self.view is None
        self._wants_view = True
        return JoinRequest(self._record)

    def request_replan(self, reason: str, now_ns: int) -> Actions:
        """Ask for a view with the newest records, as when leaving or after a change of speed."""
        self._replan_reason = reason
        self._replan_number = 0
        return self.tick(now_ns)

    def receive(self, sender: str, message: AgreementMessage, now_ns: int) -> Actions:
        """A message from `sender`, authenticated by the transport. Raises `PeerFault`."""
        if isinstance(message, JoinRequest):
            return self._receive_join_request(message, now_ns)
        if message.sender.peer_id != sender:
            raise PeerFault("speaks for another peer", sender)
        if isinstance(message, Gather):
            return self._receive_gather(message, now_ns)
        if isinstance(message, Ready):
            return self._receive_ready(message, now_ns)
        if isinstance(message, Active):
            return self._receive_active(message)
        return self._receive_synced(message)

    def plan_computed(self, snapshot: Snapshot, plan: Plan | NoPlan, now_ns: int) -> Actions:
        """The result of `ComputePlan`."""
        attempt = self._attempt
        if attempt is None or attempt.snapshot is not snapshot or attempt.plan is not None:
            return []
        attempt.plan = plan
        attempt.progress_ns = now_ns
        self._readied_number = max(self._readied_number, attempt.number)
        mine = Ready(self.me, snapshot.view_id, plan.digest())
        attempt.ready[self.me] = mine
        self._last_ready = mine
        return [SendMessage(self._others(attempt), mine), *self._check_ready()]

    def synced(self, view: ViewId) -> Actions:
        """This peer has, or follows, what its place in the agreed view needs."""
        if self.next_view is None or self.next_view.id != view or self._self_synced:
            return []
        self._self_synced = True
        self._synced.add(self.me)
        return [self._synced_message(self.next_view), *self._check_takeover_at_once()]

    @property
    def ready_for(self) -> ViewId | None:
        """What this peer's Prepared should say: the next view, if all its members are synced."""
        view = self.next_view
        return view.id if view is not None and self._all_synced(view) else None

    def committed(self, outcome: StepOutcome) -> Actions:
        """A step of the present view is committed."""
        self.step = outcome.step + 1
        if outcome.take_over is None:
            return []
        view = self.next_view
        assert view is not None and view.id == outcome.take_over, "this peer said ready for it"
        return self._take_over(view, self.step)

    def tick(self, now_ns: int) -> Actions:
        """Time has passed: resend, give up on the silent, open an attempt that is due."""
        actions: Actions = []
        attempt = self._attempt
        if attempt is not None:
            if now_ns - attempt.sent_ns >= self._timing.resend_ns:
                actions += self._resend(attempt, now_ns)
            limit_ns = self._timing.ready_ns if attempt.snapshot else self._timing.gather_ns
            if now_ns - attempt.progress_ns >= limit_ns:
                actions += self._stalled(attempt, now_ns)
        view = self.next_view
        resend_due = now_ns - self._synced_sent_ns >= self._timing.resend_ns
        if view is not None and self._self_synced and resend_due:
            self._synced_sent_ns = now_ns
            actions.append(self._synced_message(view))
        return actions + self._open_if_due(now_ns)

    @property
    def attempting(self) -> bool:
        return self._attempt is not None

    @property
    def joiners(self) -> tuple[PeerRecord, ...]:
        """Records of the newcomers that wait to be let in, sorted by peer id."""
        return tuple(self._open_record(self._joiners[peer]) for peer in sorted(self._joiners))

    # opening an attempt -----------------------------------------------------------------------

    def _receive_join_request(self, message: JoinRequest, now_ns: int) -> Actions:
        record = self._open_record(message.record)
        member = Member(record.peer_id, record.life)
        if self.view is not None and member in self.view.members:
            return []
        if len(self._joiners) >= MEMBERS_LIMIT:
            raise PeerFault("more newcomers than this swarm lets wait", record.peer_id)
        if not self._joiners:
            self._first_request_ns = now_ns
        held = self._joiners.get(record.peer_id)
        if held is not None and self._open_record(held).version >= record.version:
            return []
        self._joiners[record.peer_id] = message.record
        if held is not None:
            return []
        return [Report(f"{record.peer_id} asks to join"), *self._open_if_due(now_ns)]

    def _open_if_due(self, now_ns: int) -> Actions:
        idle = self._attempt is None and self.next_view is None and self.view is not None
        if not idle or now_ns < self._quiet_until_ns:
            return []
        if self._joiners and now_ns - self._first_request_ns >= self._timing.join_window_ns:
            return self._open(True, f"{len(self._joiners)} join", now_ns)
        if self._replan_reason:
            return self._open(True, self._replan_reason, now_ns)
        return []

    def _open(self, planned: bool, reason: str, now_ns: int) -> Actions:
        number = max(self._highest_number, self.view.id.number if self.view else 0) + 1
        base = self.view.id if self.view else GENESIS
        report = Report(f"opens view {number}: {reason}")
        attempt = self._enter(number, planned, base, now_ns)
        return [report, *self._knowledge_grew(attempt, now_ns)]

    def _enter(self, number: int, planned: bool, base: ViewId, now_ns: int) -> _Attempt:
        assert self._record is not None and number > self._readied_number
        self._highest_number = max(self._highest_number, number)
        if self._replan_reason:
            self._replan_number = number
        self.next_view = None
        self._self_synced = False
        self._synced = set()
        attempt = _Attempt(number, planned, base, progress_ns=now_ns, sent_ns=now_ns)
        self._attempt = attempt
        mine = Contribution(
            member=self.me,
            number=number,
            record=self._record,
            present=self._present_view(),
            step=self.step,
            held=dict(self.held),
            joiners=tuple(self._joiners[peer_id] for peer_id in sorted(self._joiners)),
        )
        attempt.opened[self.me] = mine
        attempt.known[self.me] = sign_contribution(mine, self._signer)
        return attempt

    def _present_view(self) -> PresentView | None:
        if self.view is None:
            return None
        plan = self.view.plan if isinstance(self.view.plan, Plan) else None
        return PresentView(self.view.id, self.view.members, plan)

    # Gather -----------------------------------------------------------------------------------

    def _receive_gather(self, message: Gather, now_ns: int) -> Actions:
        contributions = self._open_contributions(message)
        attempt = self._attempt
        if attempt is None and self._last_ready and self._last_ready.view.number == message.number:
            # The sender still gathers what this peer has agreed to: its Ready must have got lost.
            return [SendMessage((message.sender.peer_id,), self._last_ready)]
        if attempt is None or message.number > attempt.number:
            opened = {member: contribution for member, (_, contribution) in contributions.items()}
            if not self._may_enter(message, opened):
                return []
            attempt = self._enter(message.number, message.planned, message.base, now_ns)
        same = (message.number, message.planned, message.base)
        if same != (attempt.number, attempt.planned, attempt.base):
            return []
        held = attempt.digests.get(message.sender)
        if held is None or message.round >= held[0]:
            attempt.digests[message.sender] = (message.round, message.digest)
        if attempt.snapshot is not None:
            return []
        grew = attempt.round == 0
        for member, (signed, contribution) in contributions.items():
            if member not in attempt.known and self._is_welcome(contribution, attempt):
                attempt.opened[member] = contribution
                attempt.known[member] = signed
                grew = True
        if not set(message.absent) <= attempt.absent:
            attempt.absent |= set(message.absent)
            grew = True
        if grew:
            return self._knowledge_grew(attempt, now_ns)
        return self._check_settled(attempt, now_ns)

    def _open_contributions(self, message: Gather) -> dict[Member, tuple[Signed, Contribution]]:
        if len(message.contributions) > MEMBERS_LIMIT or len(message.absent) > MEMBERS_LIMIT:
            raise PeerFault("Gather with too many contributions", message.sender.peer_id)
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
        for joiner in contribution.joiners:
            self._open_record(joiner)
        return contribution

    def _open_record(self, signed: Signed) -> PeerRecord:
        record = self._records.get(signed)
        if record is None:
            record = open_record(signed, self._run_digest, self._verify)
            if len(self._records) >= 4 * MEMBERS_LIMIT:
                self._records.clear()
            self._records[signed] = record
        return record

    def _may_enter(self, message: Gather, contributions: dict[Member, Contribution]) -> bool:
        if self._record is None or message.number <= self._readied_number:
            return False
        if self.me not in self._universe(contributions):
            return False
        if self.view is None and self.next_view is not None:
            # Where the next view is the base already, this peer must first take it over.
            return message.base == self.next_view.snapshot.previous
        if self.view is None:
            return self._wants_view
        return message.planned and message.base == self.view.id

    def _is_welcome(self, contribution: Contribution, attempt: _Attempt) -> bool:
        if not attempt.planned or contribution.present is None:
            return True
        return contribution.present.view == attempt.base

    def _universe(self, contributions: dict[Member, Contribution]) -> set[Member]:
        """Who must answer: contributors, members of their views, and named newcomers."""
        newest: dict[str, int] = {}
        for member, contribution in contributions.items():
            named = [member]
            if contribution.present is not None:
                named += contribution.present.members
            for joiner in contribution.joiners:
                record = self._open_record(joiner)
                named.append(Member(record.peer_id, record.life))
            for peer in named:
                newest[peer.peer_id] = max(newest.get(peer.peer_id, 0), peer.life)
        return {Member(peer_id, life) for peer_id, life in newest.items()}

    def _knowledge_grew(self, attempt: _Attempt, now_ns: int) -> Actions:
        attempt.round += 1
        attempt.progress_ns = attempt.sent_ns = now_ns
        attempt.digests[self.me] = (attempt.round, attempt.digest)
        return [self._gather_message(attempt), *self._check_settled(attempt, now_ns)]

    def _gather_message(self, attempt: _Attempt) -> SendMessage:
        message = Gather(
            sender=self.me,
            number=attempt.number,
            planned=attempt.planned,
            base=attempt.base,
            round=attempt.round,
            contributions=tuple(attempt.known[member] for member in sorted(attempt.known)),
            absent=tuple(sorted(attempt.absent)),
            digest=attempt.digests[self.me][1],
        )
        return SendMessage(self._others(attempt), message)

    def _others(self, attempt: _Attempt) -> tuple[str, ...]:
        universe = self._universe(attempt.opened)
        return tuple(sorted(m.peer_id for m in universe if m.peer_id != self.me.peer_id))

    def _participants(self, attempt: _Attempt) -> set[Member]:
        return self._universe(attempt.opened) - attempt.absent

    def _check_settled(self, attempt: _Attempt, now_ns: int) -> Actions:
        if attempt.snapshot is not None:
            return []
        participants = self._participants(attempt)
        if self.me not in participants:
            return self._excluded(attempt, now_ns)
        digest = attempt.digests[self.me][1]
        for member in participants:
            if member not in attempt.known or attempt.digests.get(member, (0, ""))[1] != digest:
                return []
        if attempt.planned and all(c.present is None for c in attempt.opened.values()):
            return []  # newcomers alone never make a view
        attempt.snapshot = self._freeze(attempt, participants)
        attempt.progress_ns = now_ns
        return [ComputePlan(attempt.snapshot)]

    def _excluded(self, attempt: _Attempt, now_ns: int) -> Actions:
        self._attempt = None
        self._quiet_until_ns = now_ns + self._timing.retry_ns
        return [Report(f"was not heard in time for view {attempt.number}; asks again")]

    def _freeze(self, attempt: _Attempt, participants: set[Member]) -> Snapshot:
        opened = [attempt.opened[member] for member in sorted(participants)]
        records = [self._open_record(c.record) for c in opened]
        staying = [record for record in records if record.intent is not Intent.LEAVING]
        present = [c.present for c in opened if c.present is not None]
        return Snapshot(
            run_digest=self._run_digest,
            workload=self._workload,
            number=attempt.number,
            previous=attempt.base,
            planned=attempt.planned,
            records=sorted_records(staying),
            contributors=tuple(sorted(participants)),
            absent=tuple(sorted(attempt.absent)),
            step=max(c.step for c in opened),
            held=tuple(
                HeldLayer(c.member.peer_id, layer, version)
                for c in opened
                for layer, version in sorted(c.held.items())
            ),
            present=max(present, key=lambda p: p.view).plan if present else None,
        )

    # Ready ------------------------------------------------------------------------------------

    def _receive_ready(self, message: Ready, now_ns: int) -> Actions:
        attempt = self._attempt
        if attempt is None or message.view.number != attempt.number:
            return []
        attempt.ready[message.sender] = message
        attempt.progress_ns = now_ns
        return self._check_ready()

    def _check_ready(self) -> Actions:
        attempt = self._attempt
        if attempt is None or attempt.snapshot is None or attempt.plan is None:
            return []
        mine = attempt.ready[self.me]
        for member in attempt.snapshot.contributors:
            theirs = attempt.ready.get(member)
            if theirs is None or theirs.view != mine.view:
                return []
            if theirs.plan_digest != mine.plan_digest:
                reason = (
                    f"{member.peer_id} planned snapshot {mine.view.snapshot[:12]} as "
                    f"{theirs.plan_digest[:12]}, this peer as {mine.plan_digest[:12]}"
                )
                return [Halt(reason, attempt.snapshot)]
        view = View(attempt.snapshot, attempt.plan)
        self._attempt = None
        self.next_view = view
        self._synced = set()
        self._self_synced = False
        return [ViewAgreed(view), *self._check_takeover_at_once()]

    # Synced and takeover ------------------------------------------------------------------------

    def _receive_synced(self, message: Synced) -> Actions:
        if self.next_view is not None and message.view == self.next_view.id:
            self._synced.add(message.sender)
            return self._check_takeover_at_once()
        view = self.view
        if view is not None and message.view == view.id and message.sender in view.members:
            # It has not taken over yet, so this peer's Active has not reached it.
            return [SendMessage((message.sender.peer_id,), self._active)]
        return []

    def _receive_active(self, message: Active) -> Actions:
        view = self.next_view
        if view is None or message.view != view.id:
            return []
        present = view.snapshot.present
        if present is not None and present.stage_of(self.me.peer_id) is not None:
            return []  # this peer commits the step before by itself, and takes over then
        return self._take_over(view, message.step)

    def _synced_message(self, view: View) -> SendMessage:
        contributors = (member.peer_id for member in view.snapshot.contributors)
        others = tuple(sorted(peer_id for peer_id in contributors if peer_id != self.me.peer_id))
        return SendMessage(others, Synced(self.me, view.id))

    def _all_synced(self, view: View) -> bool:
        return all(member in self._synced for member in view.members)

    def _check_takeover_at_once(self) -> Actions:
        view = self.next_view
        if view is None or not view.takes_effect_at_once or not self._all_synced(view):
            return []
        return self._take_over(view, view.snapshot.step)

    def _take_over(self, view: View, step: int) -> Actions:
        if self._replan_number and view.id.number >= self._replan_number:
            self._replan_reason = ""
        self.next_view = None
        self._attempt = None
        self._self_synced = False
        self._synced = set()
        self._records = {}
        self.view = view
        self.step = step
        self._active = Active(self.me, view.id, step)
        members = set(view.member_ids)
        self._joiners = {k: v for k, v in self._joiners.items() if k not in members}
        others = tuple(m.peer_id for m in view.snapshot.contributors if m != self.me)
        said = SendMessage(others, self._active)
        return [said, TakeOver(view, step) if self.me in view.members else Left()]

    # time ---------------------------------------------------------------------------------------

    def _resend(self, attempt: _Attempt, now_ns: int) -> Actions:
        attempt.sent_ns = now_ns
        actions: Actions = [self._gather_message(attempt)]
        if self.me in attempt.ready:
            actions.append(SendMessage(self._others(attempt), attempt.ready[self.me]))
        return actions

    def _stalled(self, attempt: _Attempt, now_ns: int) -> Actions:
        silent = self._participants(attempt) - set(attempt.known)
        old_members = {
            member
            for contribution in attempt.opened.values()
            if contribution.present is not None
            for member in contribution.present.members
        }
        if attempt.snapshot is None and silent and not silent & old_members:
            attempt.absent |= silent
            for member in silent:
                self._joiners.pop(member.peer_id, None)
            names = ", ".join(sorted(member.peer_id for member in silent))
            report = Report(f"goes on without {names}: silent during Gather({attempt.number})")
            return [report, *self._knowledge_grew(attempt, now_ns)]
        waits_for = ", ".join(sorted(m.peer_id for m in silent or self._unready(attempt)))
        report = Report(f"gives up view {attempt.number}: no answer from {waits_for}")
        self._attempt = None
        self._quiet_until_ns = now_ns + self._timing.retry_ns
        if attempt.snapshot is not None and self.view is not None:
            # Others may have agreed without this peer's knowing; only a higher number ends that.
            return [report, *self._open(True, "the attempt before did not end", now_ns)]
        return [report]

    def _unready(self, attempt: _Attempt) -> set[Member]:
        return {member for member in self._participants(attempt) if member not in attempt.ready}
