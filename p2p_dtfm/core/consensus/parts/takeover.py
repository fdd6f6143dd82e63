"""From an agreed view to its first commit: the takeover, Active, and what commits in the view."""

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.consensus.actions import (
    Actions,
    Left,
    SendMessage,
    TakeOver,
    WentBack,
)
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.freezing import replay_in
from p2p_dtfm.core.consensus.parts.outsiders import Outsiders
from p2p_dtfm.core.consensus.parts.wide.telling import Telling
from p2p_dtfm.core.consensus.present import LostLayers, Present
from p2p_dtfm.core.membership.bars import united
from p2p_dtfm.core.messages.agreement_messages import Active
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.loss_counts import loss_counts
from p2p_dtfm.core.recovery.partial_replay import PartialReplay
from p2p_dtfm.core.recovery.recovery_evidence import Restart
from p2p_dtfm.core.recovery.view import View


class Takeover:
    """`docs/decisions/0002-takeover-by-prepared.md` says why takeover is decided by Prepared."""

    def __init__(self, state: AgreementState, outsiders: Outsiders, telling: Telling) -> None:
        self._state = state
        self._outsiders = outsiders
        self._telling = telling

    def committed(self, outcome: StepOutcome, now_ns: int) -> Actions:
        """The ledger gave an outcome: the step is committed, whether or not it is applied yet.

        Call this before anything else is received or awaited.
        """
        state = self._state
        assert state.view is not None and not state.frozen
        layers = state.view.layers_of(state.me.peer_id)
        prepared = state.ledger.last_commit if state.ledger is not None else ()
        state.recovery_evidence.committed(state.view.id, outcome, layers, prepared)
        if state.is_complete:
            state.present.end = self._outsiders.standing_of(state.view)
        state.attempts.failures = 0
        state.attempts.passed_by.clear()
        state.present.commits(now_ns)
        state.agreed.vouched = None
        state.doubts.accusers.commits()
        view = state.next_view
        if outcome.take_over is None or view is None or view.id != outcome.take_over:
            if state.is_complete:
                self._end_planned(now_ns)
            elif state.agreed.is_doomed:
                state.agreed.drop()
            return []
        return self.take_over(view, now_ns)

    def _end_planned(self, now_ns: int) -> None:
        """After the last step no other one can take over a planned view. Whoever waits for such a
        view is told, when it asks again, that the run is complete."""
        state = self._state
        if state.next_view is not None:
            state.agreed.drop()
        if state.attempt is not None and state.attempt.planned:
            state.give_up(now_ns)

    def skip_to(self, step: int, lineage: str) -> None:
        """For a peer without a stage: more than half of the stage-holders prepare `step` of this
        view, from this lineage, so all steps before it have committed."""
        state = self._state
        view, ledger = state.view, state.ledger
        assert view is not None and ledger is not None and not view.layers_of(state.me.peer_id)
        if not state.frozen and ledger.step < step:
            state.recovery_evidence.skip_to(view.id, step, lineage, ledger)
            ledger.skip_to(step)

    def reduced(self, step: int, layers: set[int]) -> None:
        """The reduced gradients of `step` for `layers` are here, as a holder or as a follower.

        The caller keeps them as `Agreement.reduced` says.
        """
        state = self._state
        if not state.is_newcomer and not state.frozen and step >= state.step:
            state.recovery_evidence.reduced(state.view_id, step, layers)

    def computed(self, step: int, progress: StageProgress | None) -> None:
        """How far this peer has come with the microbatches of `step`; None: it keeps nothing.

        The caller keeps all that `progress` says until the step commits or a takeover gives it up.
        """
        state = self._state
        if not state.frozen and step == state.step:
            state.recovery_evidence.progress = progress

    def take_over(self, view: View, now_ns: int) -> Actions:
        """An unplanned view starts where its contributions lead, a planned one at this step."""
        state = self._state
        from_step = state.step
        restart, replay = self._start_of(view)
        went_back = self._went_back(view, from_step)
        state.recovery_evidence.progress = (
            replay.progress(view.plan, state.me.peer_id)
            if replay is not None and isinstance(view.plan, Plan)
            else None
        )
        self._end_attempts(view, now_ns)
        self._enter_view(view, now_ns)
        if isinstance(view.plan, Plan):
            state.present.ledger = self._new_ledger(view.id, view.plan, replay)
        self.open_ledger()
        tells = self._telling.say(view, state.present.said_active)
        if state.me not in view.members:
            state.joining.is_outside = True
            return [*tells, Left()]
        standing = self._outsiders.standing_of(view)
        told = [SendMessage((m.peer_id,), standing) for m in view.snapshot.absent]
        over = TakeOver(view, state.step, state.ledger, restart, replay, went_back)
        return [*tells, *told, over]

    def _went_back(self, view: View, from_step: int) -> WentBack | None:
        """What an unplanned view takes back, and whose work that is; to be asked before the attempt
        is over."""
        attempt = self._state.attempt
        recovery = attempt.outcome.recovery if attempt is not None else None
        if view.snapshot.planned or recovery is None or recovery.undo is None:
            return None
        undo, to_step = recovery.undo, view.snapshot.step
        return WentBack(from_step, to_step, undo.peers, to_step <= undo.newest)

    def _start_of(self, view: View) -> tuple[Restart | None, PartialReplay | None]:
        """Where an unplanned view starts, and what it keeps of the step under way."""
        if view.snapshot.planned:
            return None, None
        state, attempt = self._state, self._state.attempt
        assert attempt is not None and attempt.outcome.recovery is not None
        recovery, restart = attempt.outcome.recovery, None
        if recovery.target is not None:
            restart = state.recovery_evidence.restart(state.me, recovery)
        return restart, replay_in(attempt)

    def _end_attempts(self, view: View, now_ns: int) -> None:
        """What was tried or agreed before is over."""
        state, attempts, members = self._state, self._state.attempts, set(view.member_ids)
        if view.snapshot.planned or 0 < attempts.replan_number <= view.id.number:
            attempts.replan_reason = ""  # a planned view has everybody's records, whoever asked
        if attempts.under_way is not None:
            state.ends(attempts.under_way, now_ns)
        attempts.under_way = attempts.reopen_ns = None
        attempts.frozen = False
        state.agreed.forget()
        state.agreed.vouched = None
        state.promises.said_ready.take_over()
        views = state.others.views
        views.takes_over(view)
        state.others.reminders.goes_on(state.view, state.active, views, view.members)
        state.others.farewells.goes_on(state.view, view)
        # most members stay the same: their records need not be opened again
        state.others.opened_records.keep_only(members)

    def _enter_view(self, view: View, now_ns: int) -> None:
        state, before = self._state, self._state.present
        said = Active(state.me, view.id, state.step, state.recovery_evidence.lineage.digest)
        said = stated(said, state.settings.sign)
        early = before.active_members.get(view.id, {})
        state.present = Present(
            said_active=said,
            view=view,
            taken_over_ns=now_ns,
            active_members={view.id: early | {state.me: said}},
            active_sent_ns=before.active_sent_ns,
            last_commit=before.newest_commit,
            lost=self._lost(view, now_ns),
            may_repeat_steps=_repeatable_steps(view, before),
            met_ns=now_ns,
            end=before.end if state.is_complete else None,
        )
        state.doubts.suspects &= set(view.members)
        state.doubts.distrusted = set()
        state.doubts.carried -= set(view.members)
        contributors = tuple(member.peer_id for member in view.snapshot.contributors)
        state.others.newcomers.let_in(contributors)  # one that leaves needs no place
        state.others.familiar.meet(view.member_ids)
        state.others.bars = united((*state.others.bars, *view.snapshot.bars), view.member_ids)

    def _lost(self, view: View, now_ns: int) -> LostLayers | None:
        """Lost layers, with the time since when they count as waited for.

        Where all that had them have come, that is long enough ago to go back at once: there is
        nobody to wait for. It is so only once. Of two peers that ask anew whenever the other's view
        was taken over, neither would stop.
        """
        if not view.snapshot.lost_layers:
            return None
        before, limit_ns = self._state.present, self._state.timing.lost_layers_ns
        had_all = self._who_had_all(view)
        if before.accepts_loss:  # if most others still wait, this peer asks again once they have
            return LostLayers(now_ns - limit_ns // 2, had_all)
        waited = set(before.view.member_ids) if before.view and before.lost else set()
        if had_all and had_all <= set(view.member_ids) and not had_all <= waited:
            return LostLayers(now_ns - limit_ns, had_all)
        return LostLayers(before.lost.since_ns if before.lost is not None else now_ns, had_all)

    def _who_had_all(self, view: View) -> frozenset[str]:
        """The peers that had all lost layers between them, as far as this peer was there. Nobody
        else can have a newer state of these layers than what is told in the view."""
        before, views, me = self._state.present, self._state.others.views, self._state.me
        if before.view is not None:
            return before.lost.had_all if before.lost else frozenset(before.view.member_ids)
        mine = (known for known in reversed(views.history) if me.peer_id in known.peer_ids)
        return next((known.peer_ids for known in mine if known.view != view.id), frozenset())

    def _new_ledger(self, view: ViewId, plan: Plan, replay: PartialReplay | None) -> Ledger:
        state = self._state
        first = (
            loss_counts(plan, replay) if replay is not None and replay.step == state.step else None
        )
        return Ledger(view, plan, state.step, state.settings.terms, loss_counts(plan), first)

    def open_ledger(self) -> None:
        """Let the steps of the view commit once all members are active."""
        state = self._state
        if state.ledger is not None:
            state.ledger.may_commit = state.all_are_active

    def tell_active(self, now_ns: int) -> Actions:
        """Say Active to those that have not said it, with the certificate if they are late."""
        state, view = self._state, self._state.view_in_force
        if view is None:
            return []
        missing = set(view.members) - state.active.keys()
        if not missing or now_ns - state.present.active_sent_ns < state.timing.resend_ns:
            return []
        state.present.active_sent_ns = now_ns
        if state.is_wide(view):
            return self._telling.ask(view, missing, now_ns)
        said, to = state.present.said_active, tuple(sorted(m.peer_id for m in missing))
        is_late = now_ns - state.present.taken_over_ns >= state.timing.resend_ns
        proof = view.certificate if is_late else None  # they may lack somebody's Ready
        asking = Active(state.me, view.id, said.step, said.lineage, True, proof)
        others = self._telling.ask(view, missing, now_ns) if is_late else []
        return [SendMessage(to, stated(asking, state.settings.sign)), *others]


def _repeatable_steps(view: View, before: Present) -> int:
    """How many steps a failure may cost. While layers are lost, what the view before said of that
    stands."""
    if not isinstance(view.plan, Plan):
        return before.may_repeat_steps
    return view.cut_pace.may_repeat_steps if view.cut_pace is not None else 0
