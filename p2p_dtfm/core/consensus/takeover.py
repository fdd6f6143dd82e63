"""From an agreed view to its first commit: Synced, the takeover, Active."""

from collections.abc import Mapping

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.consensus.actions import (
    Actions,
    Left,
    Report,
    SendMessage,
    TakeOver,
)
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.cost_model.placement_problem import UNKNOWN_BYTES_PER_S, duration_ns, flow_of
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    Heartbeat,
    Synced,
)
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.loss_counts import loss_counts
from p2p_dtfm.core.recovery.partial_replay import PartialReplay
from p2p_dtfm.core.recovery.recovery_evidence import Restart
from p2p_dtfm.core.recovery.view import View

TRANSFERS_LIMIT = 4
DEADLINES_LIMIT = 6
"""A newcomer that gets on may take so many times as long as its states and the deadline need. What
a transfer needs doubles with each time that it was refused: a link may be slower than was
measured."""
STEPS_AHEAD = 2
"""States are offered between two steps: so many may have to pass before."""


class Takeover(AgreementState):
    """`docs/decisions/0002-takeover-by-prepared.md` says why takeover is decided by Prepared."""

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
        layers = self.view.layers_of(self.me.peer_id)
        prepared = self.ledger.last_commit if self.ledger is not None else ()
        self.recovery_evidence.committed(self.view.id, outcome, layers, prepared)
        self._failures = 0
        self._vouched = None
        self._accusers.commits()
        view = self.next_view
        if outcome.take_over is None or view is None or view.id != outcome.take_over:
            if self._drop_next:
                self._drop_next_view()
            return []
        return self._take_over(view, now_ns or self._taken_over_ns)

    def skip_to(self, step: int, lineage: str) -> None:
        """Without a stage: more than half of those with one prepare `step` of this view, from this
        lineage, so all before it committed."""
        view, ledger = self.view, self.ledger
        assert view is not None and ledger is not None and not view.layers_of(self.me.peer_id)
        if not self.frozen and ledger.step < step:
            self.recovery_evidence.skip_to(view.id, step, lineage, ledger)
            ledger.skip_to(step)

    def reduced(self, step: int, layers: set[int]) -> None:
        """The reduced gradients of `step` for `layers` are here, as a holder or as a follower.

        The caller keeps them until a later step has committed. Those of a step that is committed
        already, with which a guardian catches up, are of no use to anybody.
        """
        if self.view is not None and not self.frozen and step >= self.step:
            self.recovery_evidence.reduced(self.view.id, step, layers)

    def computed(self, step: int, progress: StageProgress | None) -> None:
        """So far this peer has come with the microbatches of `step`; None: it keeps nothing.

        The caller keeps all that `progress` says until the step commits or a takeover gives it up.
        """
        if not self.frozen and step == self.step:
            self.recovery_evidence.progress = progress

    def _receive_synced(self, message: Synced, now_ns: int) -> Actions:
        following = self.next_view
        if following is not None and message.view == following.id:
            if message.sender in following.members:
                self._synced.add(message.sender)
            return []
        view = self.view
        if view is None or message.view != view.id or self.frozen:
            return []
        if message.sender in view.snapshot.contributors:
            # It has not taken over yet, so this peer's Active has not reached it.
            return [SendMessage((message.sender.peer_id,), self._active)]
        return []

    def _give_up_unsynced(self, now_ns: int) -> Actions:
        """Who never gets its state, though it lives, must not keep others from joining."""
        view = self.next_view
        waited_ns = now_ns - self._agreed_ns
        patience = 1 if self.view is not None else 2  # a newcomer leaves it to the members
        if view is None or self._drop_next:
            return []
        hold_up = self._stuck_newcomers(now_ns) or self._idle_members(now_ns)
        if waited_ns < patience * self._timing.sync_ns and not hold_up:
            return []
        unsynced = ", ".join(m.peer_id for m in view.members if m not in self._synced)
        self._refuse_unsynced(now_ns, 1)
        self._drop_next = True
        if self._vouched is None:
            self._drop_next_view()
        if not unsynced:
            return []
        return [Report(f"gives up view {view.id}, which waits for the states of {unsynced}")]

    def _refuse_unsynced(self, now_ns: int, haste: int) -> None:
        """Who did not get its states; with `haste`, in such a part of the time that it has."""
        due = (now_ns - self._agreed_ns) * haste >= self._timing.sync_ns
        newcomers = self._unsynced_newcomers if due else self._stuck_newcomers(now_ns, haste)
        for member in newcomers:
            self._newcomers.refuse(member.peer_id, now_ns)
        if self.next_view is not None:
            idle, number = self._idle_members(now_ns, haste), self.next_view.id.number
            again = self._accusers.holds_up(idle, number, now_ns)
            self._suspects |= again
            self._distrust_members(again)

    def _idle_members(self, now_ns: int, haste: int = 1) -> list[Member]:
        """Members of both views that need no states for the next, and do not say that they have
        them: there is nothing that they could wait for."""
        view, following = self.view, self.next_view
        deadline_ns = self._timing.newcomer_sync_ns + self._until_offered_ns
        is_due = (now_ns - self._agreed_ns) * haste >= deadline_ns
        if view is None or following is None or not is_due or self.me not in view.members:
            return []
        idle = []
        for member in sorted(set(view.members) & set(following.members) - self._synced):
            has = set(view.layers_of(member.peer_id)) | view.guarded_by(member.peer_id)
            needs = set(following.layers_of(member.peer_id)) | following.guarded_by(member.peer_id)
            if member != self.me and needs <= has:
                idle.append(member)
        return idle

    @property
    def _unsynced_newcomers(self) -> list[Member]:
        """Who is to join, and keeps the members of the present view from taking over the next."""
        if self.view is None or self.next_view is None:
            return []
        new = set(self.next_view.members) - set(self.view.members)
        return sorted(new - self._synced)

    def _stuck_newcomers(self, now_ns: int, haste: int = 1) -> list[Member]:
        """Of these, who gets no more states, or takes many times as long as its links need."""
        stuck = []
        for member in self._unsynced_newcomers:
            needs_ns = self._transfer_ns(member)
            grown_ns = self._given.grown_ns(member.peer_id)
            patience = TRANSFERS_LIMIT << self._newcomers.refusals(member.peer_id)
            longest_ns = DEADLINES_LIMIT * self._timing.newcomer_sync_ns + patience * needs_ns
            deadline_ns = self._timing.newcomer_sync_ns
            if grown_ns is None:  # it has not even begun: for that it takes no fast link
                since_ns, deadline_ns = self._agreed_ns, deadline_ns + self._until_offered_ns
            else:
                since_ns, deadline_ns = grown_ns, deadline_ns + needs_ns
            no_progress = (now_ns - since_ns) * haste >= deadline_ns
            if no_progress or (now_ns - self._agreed_ns) * haste >= longest_ns:
                stuck.append(member)
        return stuck

    @property
    def _until_offered_ns(self) -> int:
        plan = self.view.plan if self.view is not None else None
        return STEPS_AHEAD * plan.predicted_step_ns if isinstance(plan, Plan) else 0

    def _transfer_ns(self, newcomer: Member) -> int:
        """What the states of its layers take on the way there, by what members measured."""
        view = self.next_view
        assert self.view is not None and view is not None
        snapshot, members = view.snapshot, set(self.view.member_ids)
        rates = [
            flow_of(giver, snapshot.record(newcomer.peer_id))[0]
            for giver in snapshot.records
            if giver.peer_id in members and newcomer.peer_id in giver.links
        ]
        layers = set(view.layers_of(newcomer.peer_id)) | view.guarded_by(newcomer.peer_id)
        size = sum(snapshot.workload.cost(layer).state_bytes for layer in layers)
        needs_ns = duration_ns(size, max(1, max(rates, default=UNKNOWN_BYTES_PER_S)))
        return min(needs_ns, self._timing.sync_ns)

    def gives(self, given: Mapping[str, int], now_ns: int) -> None:
        """So many bytes this peer has given, since the next view was agreed on, to each of those
        that `needy` names."""
        self._given.note(self.me, given, now_ns)

    @property
    def needy(self) -> tuple[str, ...]:
        """Who is to join with the next view, and has not said that it has its states."""
        return tuple(member.peer_id for member in self._unsynced_newcomers)

    def _note_progress(self, message: Heartbeat, now_ns: int) -> None:
        """A newcomer gets on by the word of those who give to it. Its own counts only where there
        is nothing to give: where training begins each makes the first states by itself."""
        view, following = self.view, self.next_view
        if view is None or following is None:
            return
        if message.sender in view.members:
            self._given.note(message.sender, message.gives, now_ns)
        elif message.sender in following.members and following.snapshot.step == 0:
            own = {message.sender.peer_id: message.progress}
            self._given.note(message.sender, own, now_ns)

    def _synced_message(self, view: View) -> SendMessage:
        said = stated(Synced(self.me, view.id), self._signer)
        return SendMessage(self._contributors(view), said)

    def _contributors(self, view: View) -> tuple[str, ...]:
        names = (member.peer_id for member in view.snapshot.contributors)
        return tuple(sorted(peer_id for peer_id in names if peer_id != self.me.peer_id))

    def _all_synced(self, view: View) -> bool:
        return all(member in self._synced for member in view.members)

    def _take_over(self, view: View, now_ns: int) -> Actions:
        """An unplanned view starts where its contributions lead, a planned one at this step."""
        restart: Restart | None = None
        replay: PartialReplay | None = None
        attempt = self._attempt
        if not view.snapshot.planned:
            assert attempt is not None and attempt.recovery is not None
            if attempt.recovery.target is not None:
                restart = self.recovery_evidence.restart(self.me, attempt.recovery)
            replay = attempt.replay()
        self.recovery_evidence.progress = (
            replay.progress(view.plan, self.me.peer_id)
            if replay is not None and isinstance(view.plan, Plan)
            else None
        )
        if self._replan_number and view.id.number >= self._replan_number:
            self._replan_reason = ""
        early = self._active_members.get(view.id, {})
        if attempt is not None:
            self._heed_accusers(attempt, now_ns)
        if self.ledger is not None and self.ledger.last_commit:
            self._last_commit = self.ledger.last_commit
        self._known.takes_over(view)
        if self._accepts_loss:  # where most others still wait, it asks again when they have waited
            self._lost_since_ns = now_ns - self._timing.lost_layers_ns // 2
        self.next_view = self._attempt = self._dropped = self._reopen_ns = self._vouched = None
        self._said_ready.take_over()
        self._self_synced = self._drop_next = self.frozen = self._accepts_loss = False
        self._synced, self._records = set(), {}
        self.view, self._taken_over_ns = view, now_ns
        lost_since_ns = now_ns if self._lost_since_ns is None else self._lost_since_ns
        self._lost_since_ns = lost_since_ns if view.snapshot.lost_layers else None
        self._suspects &= set(view.members)
        self._distrusted = set()
        said = Active(self.me, view.id, self.step, self.recovery_evidence.lineage.digest)
        self._active = stated(said, self._signer)
        self._active_members = {view.id: early | {self.me: self._active}}
        self._newcomers.let_in(view.member_ids)
        self.familiar.meet(view.member_ids)
        plan = view.plan
        self.ledger = self._new_ledger(view.id, plan, replay) if isinstance(plan, Plan) else None
        self._open_ledger()
        tells = SendMessage(self._contributors(view), self._active)
        if self.me not in view.members:
            self._outside = True
            return [tells, Left()]
        self._met_ns = now_ns
        standing = self._standing(view)
        told = [SendMessage((m.peer_id,), standing) for m in view.snapshot.absent]
        return [tells, *told, TakeOver(view, self.step, self.ledger, restart, replay)]

    def _new_ledger(self, view: ViewId, plan: Plan, replay: PartialReplay | None) -> Ledger:
        first = (
            loss_counts(plan, replay) if replay is not None and replay.step == self.step else None
        )
        return Ledger(view, plan, self.step, self.terms, loss_counts(plan), first)

    @property
    def _awaits_new_plan(self) -> bool:
        """Whether the plan is one for the time being, and all members are there to plan anew."""
        plan, ledger = (self.view.plan, self.ledger) if self.view is not None else (None, None)
        is_stopgap = isinstance(plan, Plan) and (bool(plan.stand_ins) or plan.provisional)
        return is_stopgap and ledger is not None and ledger.may_commit

    def _open_ledger(self) -> None:
        if self.ledger is not None and self.view is not None:
            active = self._active_members.get(self.view.id, {})
            self.ledger.may_commit = all(member in active for member in self.view.members)

    def _tell_active(self, now_ns: int) -> Actions:
        view = self.view
        if view is None or self.frozen or self.me not in view.members:
            return []
        missing = set(view.members) - self._active_members.get(view.id, {}).keys()
        if not missing or now_ns - self._active_sent_ns < self._timing.resend_ns:
            return []
        self._active_sent_ns = now_ns
        said, to = self._active, tuple(sorted(m.peer_id for m in missing))
        is_late = now_ns - self._taken_over_ns >= self._timing.resend_ns
        proof = view.certificate if is_late else None  # it may lack somebody's Ready
        asking = Active(self.me, view.id, said.step, said.lineage, True, proof)
        return [SendMessage(to, stated(asking, self._signer))]
