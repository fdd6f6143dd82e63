"""Leaderless agreement on a view: Gather until all know the same, say Ready, then take over.

A sans-I/O state machine. Inputs are its methods; each returns the actions that the caller must
carry out. Time is the `now_ns` of each input, and planning, which may take long, is an action
whose result comes back as an input.

    Gather   everyone's contribution is flooded until all digests of the knowledge are equal
    Ready    the knowledge is frozen and planned; Ready from every contributor makes a view agreed
    Synced   each member of the agreed view has the state that its place needs, or follows it
    takeover a planned view: after the first step whose every Prepared says that all are synced.
             An unplanned one: at once, from the step that its contributions lead to
    Active   each member says it when it takes over; no step commits before all have said it

A view change is planned (even numbers) while steps go on, unplanned (odd numbers) after a failure
or where no steps happen. Entering an unplanned Gather freezes the step under way: from then on
what each peer contributes decides whether it is rolled forward or repeated
(`core.recovery.restart_point`).

`table` says which message goes to which of the machines (`parts`) in which phase; all of them work
on one `AgreementState`.

A number is given at most one Ready in a life, and an attempt with a higher number replaces a
lower one. `docs/decisions/0002-takeover-by-prepared.md` says why takeover is decided by Prepared.
"""

from collections.abc import Collection, Mapping

from p2p_dtfm.core.consensus.actions import Actions, Heard, Verdict, refused
from p2p_dtfm.core.consensus.agreement_readings import AgreementReadings
from p2p_dtfm.core.consensus.agreement_state import AgreementState, RunConstants
from p2p_dtfm.core.consensus.machines import machines_of
from p2p_dtfm.core.consensus.parts import forks
from p2p_dtfm.core.consensus.phase import phase_of
from p2p_dtfm.core.consensus.table import dispatch
from p2p_dtfm.core.consensus.views.reminders import Signatures
from p2p_dtfm.core.membership.bars import united
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Heartbeat,
    JoinRequest,
    KnownView,
    SavedState,
    Standing,
)
from p2p_dtfm.core.messages.message_bounds import require_bounded
from p2p_dtfm.core.messages.prepared import Statement, StepOutcome
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.messages.statements import STATEMENTS, require_stated
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Bar, Member, Snapshot, ViewId

ANOTHER_RUN = "it is of another run, whose views are not to be compared"


class Agreement(AgreementReadings):
    """One peer's part in agreeing on views.

    `step` is the number of its committed steps, `held` the version of each layer whose state it
    has; the caller keeps `held` up to date. `sign` and `verify` of its `settings` are of this run
    (`signed.signing_in`): certificates are believed whoever shows them, and a member may be in
    another run as well.
    """

    def __init__(
        self, me: Member, settings: RunConstants, history: tuple[KnownView, ...] = ()
    ) -> None:
        self._state = AgreementState(me, settings, history)
        self._machines = machines_of(self._state)
        self.last_heard: Heard | None = None
        """What became of the last message other than a Heartbeat: Heartbeats come all the time."""

    # what this peer is and has --------------------------------------------------------------------

    def begin_life(self, record: PeerRecord, signed: Signed) -> JoinRequest:
        """After `Rejoin`: be a newcomer, with a higher life."""
        assert record.life > self.me.life
        self.recall_signatures(self.signatures)
        self._state.begin_life(Member(record.peer_id, record.life))
        self.set_record(record, signed)
        return self.wants_view()

    def recall_bars(self, bars: tuple[Bar, ...]) -> None:
        """Take over the bars that an earlier start left on this peer's disk."""
        self._state.others.bars = united((*self._state.others.bars, *bars))

    def recall_signatures(self, kept: tuple[Signatures, ...]) -> None:
        """Take over signatures of members of earlier views, as this peer has kept them."""
        self._state.others.reminders.recall(kept)

    def set_record(self, record: PeerRecord, signed: Signed) -> None:
        """This peer's newest record; it counts from the next view on."""
        assert record.peer_id == signed.peer_id == self.me.peer_id
        assert record.life == self.me.life
        self._state.record = signed
        self._state.intent = record.intent

    def resume(
        self, step: int, held: dict[int, int], lineage: str, saved: tuple[SavedState, ...] = ()
    ) -> None:
        """Start from what is on disk."""
        self.recovery_evidence.lineage.move_to(step, lineage)
        self.recovery_evidence.held = dict(held)
        self.set_saved(saved)

    def set_saved(self, saved: tuple[SavedState, ...]) -> None:
        """The states on disk that the run could be started from now."""
        self.recovery_evidence.saved = saved

    def set_cuts(self, cuts: tuple[SavedState, ...]) -> None:
        """This peer's copies of cuts, as they are now."""
        self.recovery_evidence.cuts = cuts

    def know(self, peer_id: str) -> None:
        """A peer of this run that may be in another view, such as one found in the directory."""
        self._state.know(peer_id)

    # wishes ---------------------------------------------------------------------------------------

    def found(self, now_ns: int) -> Actions:
        """Make the first view, of this peer and the newcomers that asked so far."""
        return self._machines.opening.found(now_ns)

    def wants_view(self) -> JoinRequest:
        """Become a newcomer that may be let in; the caller sends the request to other peers."""
        assert self._state.record is not None and self._state.is_newcomer
        self._state.joining.wants_view = True
        return self._machines.outsiders.join_request(self._state.record)

    def request_replan(self, reason: str, now_ns: int) -> Actions:
        """Ask for a view with the newest records, as after a change of speed."""
        self._state.attempts.replan_reason = reason
        self._state.attempts.replan_number = 0
        return self.tick(now_ns)

    def repeat_step(self, reason: str, now_ns: int) -> Actions:
        """Something of the step under way is lost, though perhaps no peer is: a new view repeats
        the step."""
        return self._machines.opening.repeat_step(reason, now_ns)

    # what happens ---------------------------------------------------------------------------------

    def receive(self, sender: str, message: AgreementMessage, now_ns: int) -> Actions:
        """A message from `sender`, authenticated by the transport. Raises `PeerFault`."""
        verdict = self._receive(sender, message, now_ns)
        if not isinstance(message, Heartbeat):
            self.last_heard = Heard(sender, type(message).__name__, verdict.reason)
        return verdict.actions

    def _receive(self, sender: str, message: AgreementMessage, now_ns: int) -> Verdict:
        state, machines = self._state, self._machines
        if state.joining.is_outside:
            return dispatch(machines, phase_of(state), sender, message, now_ns)
        require_bounded(message, sender)
        if isinstance(message, JoinRequest):
            return dispatch(machines, phase_of(state), sender, message, now_ns)
        if message.sender.peer_id != sender:
            raise PeerFault("speaks for another peer", sender)
        if message.sender.life < state.others.lives.get(sender, 0) or message.sender == state.me:
            return refused("it is of an earlier life, or this peer's own")
        if isinstance(message, Standing) and message.run_digest != state.settings.run_digest:
            return refused(ANOTHER_RUN)
        if isinstance(message, STATEMENTS):
            require_stated(message, state.settings.verify)
        actions = machines.suspicion.hear(message.sender, now_ns)
        try:
            found = dispatch(machines, phase_of(state), sender, message, now_ns)
        except PeerFault as fault:
            if not actions:
                raise
            # hearing from the sender may have begun something: that must be carried out
            return Verdict(actions, str(fault))
        return Verdict(actions + found.actions, found.reason)

    def tick(self, now_ns: int) -> Actions:
        """Time has passed: resend, give up on the silent, open an attempt that is due."""
        state, machines = self._state, self._machines
        if state.joining.is_outside:
            return []
        state.wake_up(now_ns)
        state.attempts.lateness.ticked(now_ns)
        if state.attempt is not None:
            actions = self._tick_attempt(now_ns)
        else:
            actions = machines.opening.open_again(now_ns)
        actions += machines.syncing.resend(now_ns)
        actions += machines.syncing.give_up_unsynced(now_ns)
        actions += machines.opening.open_without_lost(now_ns)
        actions += machines.takeover.tell_active(now_ns)
        actions += machines.meeting.meet(now_ns)
        return actions + machines.opening.open_if_due(now_ns)

    def _tick_attempt(self, now_ns: int) -> Actions:
        state, machines, attempt = self._state, self._machines, self._state.attempt
        assert attempt is not None
        actions: Actions = []
        if now_ns - attempt.clock.sent_ns >= state.timing.resend_ns:
            actions += machines.gathering.resend(attempt, now_ns)
        if attempt.snapshot is None and machines.reception.believe_absent(attempt, now_ns):
            actions += machines.gathering.knowledge_grew(attempt, now_ns)
        waited_ns = now_ns - attempt.clock.progress_ns
        if waited_ns >= machines.reception.patience_ns(attempt):
            actions += machines.suspicion.stalled(attempt, now_ns)
        return actions

    def pass_on(self, now_ns: int) -> Actions:
        """Pass on what waits, as `PassOnSoon` has asked."""
        machines = self._machines
        if self._state.joining.is_outside:
            return machines.telling.pass_on()
        return machines.spreading.pass_on(now_ns) + machines.telling.pass_on()

    def plan_computed(self, snapshot: Snapshot, plan: Plan | NoPlan, now_ns: int) -> Actions:
        """The result of `ComputePlan`."""
        return self._machines.gathering.plan_computed(snapshot, plan, now_ns)

    # evidence -------------------------------------------------------------------------------------

    def suspect(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """Evidence that this peer cannot reach `peer_id`. Hearing from `peer_id` takes it back."""
        return self._machines.suspicion.suspect(peer_id, reason, now_ns)

    def hold_up(self, reasons: Mapping[str, str], now_ns: int) -> Actions:
        """Evidence, by peer id, that members do not do their part of the step. It stays until the
        takeover, however many attempts that takes, and even if those members answer."""
        return self._machines.suspicion.hold_up(reasons, now_ns)

    def turn_away(self, peer_id: str, now_ns: int) -> None:
        """Refuse a newcomer that waits to be let in."""
        self._state.others.newcomers.refuse(peer_id, now_ns)

    def distrust(self, peer_id: str, reason: str, now_ns: int) -> Actions:
        """`peer_id` sends what no correct peer sends. Hearing from it does not clear it.

        This peer says so in the unplanned attempt under way, or else in the next attempt. The
        caller opens that one a little later, with `suspect`. By then others that were sent the same
        have found it out as well, so it is not one word against another.
        """
        return self._machines.suspicion.distrust(peer_id, reason, now_ns)

    # steps ----------------------------------------------------------------------------------------

    def synced(self, view: ViewId) -> Actions:
        """This peer has, or follows, what its place in the agreed view needs."""
        return self._machines.syncing.synced(view)

    def vouch(self) -> ViewId | None:
        """What this peer's Prepared must say: the next view, if all its members are synced.

        It is a promise: the next view stays until the step under way commits.
        """
        return self._machines.syncing.vouch()

    def gives(self, given: Mapping[str, int], now_ns: int) -> None:
        """How many bytes this peer has given to each peer that `needy` names since the next view
        was agreed on."""
        self._machines.syncing.gives(given, now_ns)

    def committed(self, outcome: StepOutcome, now_ns: int) -> Actions:
        """The ledger gave an outcome: the step is committed, whether or not it is applied yet.

        Call this before anything else is received or awaited.
        """
        actions = self._machines.takeover.committed(outcome, now_ns)
        return actions + self._machines.passing_on.committed()

    def said_of_last_step(self, peer_id: str) -> Signed | None:
        """The Prepared of the peer by which the last step was committed here."""
        return forks.said_of_last_step(self._state, peer_id)

    def hears_unlike(self, shown: Statement) -> bool:
        """Whether the maker of a Prepared that another member shows has said another one of that
        step, by which this peer has committed it. Then the caller has all agree anew."""
        return forks.hears_unlike(self._state, shown)

    def skip_to(self, step: int, lineage: str) -> None:
        """For a peer without a stage: more than half of the stage-holders prepare `step` of this
        view, from this lineage, so all steps before it have committed."""
        self._machines.takeover.skip_to(step, lineage)

    def reduced(self, step: int, layers: set[int]) -> None:
        """The reduced gradients of `step` for `layers` are here, as a holder or as a follower.

        The caller keeps them until `applied`, or until a later step has committed. It keeps those
        of a step that fails in several views as `rollable_steps` says. Gradients of a committed
        step, with which a guardian catches up, are of no use to anybody.
        """
        self._machines.takeover.reduced(step, layers)

    def applied(self, step: int, layers: Collection[int]) -> None:
        """The states of these layers have taken the committed `step`."""
        self.recovery_evidence.applied(step, layers)

    def computed(self, step: int, progress: StageProgress | None) -> None:
        """How far this peer has come with the microbatches of `step`; None: it keeps nothing.

        The caller keeps all that `progress` says until the step commits or a takeover gives it up.
        """
        self._machines.takeover.computed(step, progress)
