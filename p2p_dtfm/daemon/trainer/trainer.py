"""The steps of this peer: it takes its place in each view, computes, and commits with the others.

The trainer owns the layers' states. The daemon tells it of agreed views and takeovers, Prepared
messages and tensors; it tells the daemon what it has to say through `Outlet`. Its parts:

trainer_state   where this peer stands, which all parts share
view_mail       what arrives for a view, be it early
place           the layers of this peer's place in the present view and the next
followers       states that come here while others train on them
cut_transfers   copies of states as of one step, for guardians that lag
restarting      the states brought to where an unplanned view starts
step_loop       the steps of a stage-holder
step_waits      what it lacks of whom in its step, and what it has given to whom
audited         whose work it computes again, and what it says of its own

`run_history`, of what has been committed, and `seen_paces`, of how fast tensors came, are
telemetry's.
"""

import asyncio
import contextlib
from collections.abc import Awaitable

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.audit_messages import Audited, Claimed, ShownClaims
from p2p_dtfm.core.messages.message_bounds import require_bounded_part
from p2p_dtfm.core.messages.prepared import STEPS_AHEAD_LIMIT, Statement
from p2p_dtfm.core.messages.work import Work
from p2p_dtfm.core.planner.explain import spare_in_short
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.partial_replay import PartialReplay
from p2p_dtfm.core.recovery.recovery_evidence import Restart
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import CutBegun, CutReceipt
from p2p_dtfm.daemon.telemetry.run_history import RunHistory
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts
from p2p_dtfm.daemon.trainer.followers import Followers, Following
from p2p_dtfm.daemon.trainer.place import PlaceInView
from p2p_dtfm.daemon.trainer.restarting import Restarting
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.daemon.trainer.step_waits import StepWaits
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Stopped, Tools, TrainerState
from p2p_dtfm.daemon.trainer.view_mail import ViewMail
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from p2p_dtfm.train.model.layer_state import LayerState

SETTLE_LIMIT_S = 30.0
SETTLE_POLL_S = 0.02
GUARDIAN_POLL_S = 0.2
TURNS_LIMIT = 64
"""Turns of the event loop in which a step may commit; then a peer without a stage may skip it."""


class Trainer:
    """`run` trains until the run is done or it is cancelled."""

    def __init__(self, tools: Tools, outlet: Outlet) -> None:
        self.done = asyncio.Event()
        self.history = RunHistory(tools.spec, tools.status)
        self._tools = tools
        self._outlet = outlet
        self._safe_before: int | None = None
        self._spec = tools.spec
        self._state = TrainerState(tools.me)
        self._mail = ViewMail(tools.me, tools.spec, self._state)
        self._followers = Followers(tools, outlet, self._state)
        self.cuts = Cuts(tools, outlet, self._state)
        self._place = PlaceInView(tools, outlet, self._state, self._followers, self.cuts)
        self._steps = StepLoop(
            tools, outlet, self._state, self._place, self._followers, self.cuts, self.history
        )
        audits = self._steps.audits
        self._restarting = Restarting(tools, outlet, self._state, self.cuts, audits, self.history)
        self.waits = StepWaits(tools, self._state, self._steps, self._followers)
        self.seen_paces = self._state.paces
        self._is_closed = False
        self.are_given = False
        """Whether the states here were given to this peer before it is in the others' view. What it
        knows of its own lineage is not theirs."""
        self._behind: Ledger | None = None
        """The ledger of the view before, if this peer has not seen its last step commit yet."""

    @property
    def states(self) -> dict[int, LayerState]:
        """The layers here."""
        return self._state.states

    @property
    def held(self) -> dict[int, int] | None:
        """The version of each layer here; None while a restart is due that will change them."""
        if self._state.restarts:
            return None
        return {layer: state.version for layer, state in self._state.states.items()}

    def tell_safe_step(self) -> int | None:
        """How many steps outlive a crash of any one peer. In a new view they are no more than was
        told before, until all members have said that they are in it. A newcomer could show nobody
        what it has got for its place, if the others died before it heard that the view is in
        force."""
        here, before = self._safe_here(), self._safe_before
        if not self._outlet.are_all_in():
            here = None if here is None or before is None else min(here, before)
        self._safe_before = here
        if here is None:
            return None
        return min(here, self._state.step, self._spec.total_steps)  # the last look makes no state

    def _safe_here(self) -> int | None:
        """How many committed steps are safe as far as this peer knows. Mostly they are all that
        somebody else could show. Where guardians lag they are those of the newest whole cut.

        They are those of a checkpoint where a layer has one copy only, also while its guardian
        still fetches it; and where guardians lag and somebody has gone, until another cut is whole.
        """
        state, view = self._state, self._state.view
        lags = view is not None and view.cut_pace is not None
        lags |= not self.cuts.guardians_have_all
        if lags and self.cuts.safe_step is not None:
            return self.cuts.safe_step
        is_alone = view is None or len(view.members) < 2 or bool(view.unguarded) or lags
        if not is_alone:
            return self._outlet.shown_of(state.step)
        others = set(view.member_ids) - {self._tools.me} if view is not None else set()
        return self._tools.stores.checkpoints.safe_step(others)

    # what the daemon tells ---------------------------------------------------------------------

    def adopt(self, states: dict[int, LayerState], step: int) -> None:
        """Start from a checkpoint."""
        self._state.states.update(states)
        self._state.step = step

    def view_agreed(self, view: View, discard: bool) -> None:
        """Bring the layers that the next view wants here; then say synced. A peer that has left may
        still be in an attempt that the others end without it: it brings nothing any more."""
        if self._is_closed:
            return
        if discard:
            self.are_given = True
            self._restarting.forget()
        self._mail.agreed(view)
        self._tools.stores.donor.agreed(view)
        self._place.agreed(view, discard)

    def stop_step(self) -> None:
        """A failure: the step under way is decided by the next view. Keep all, compute nothing."""
        self._state.stopped = True
        self._waits_for_nobody()
        self._followers.stop_guarding()
        self.cuts.stop()
        self._steps.stop()
        self._state.wake.set()

    def leave_views(self) -> None:
        """This peer is in no view any more; a step that has just committed is still applied."""
        self._followers.stop_following()
        self._place.leave_views()
        self._followers.stop_guarding()
        self.cuts.stop()
        self._steps.forget_work()
        self._mail.leave_views()
        self.history.left_views()
        self._state.view = self._state.ledger = None
        self._waits_for_nobody()
        self._state.wake.set()

    def _waits_for_nobody(self) -> None:
        self._tools.status.facts["waits_for"] = []

    async def settled(self) -> None:
        """Wait, for a bounded time, until the last committed step is applied to all states."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_LIMIT_S):
                while self._steps.is_applying and not self._state.stopped:
                    await asyncio.sleep(SETTLE_POLL_S)

    def take_over(
        self,
        view: View,
        step: int,
        ledger: Ledger | None,
        restart: Restart | None,
        replay: PartialReplay | None = None,
    ) -> None:
        """From `step` on, steps happen in this view and commit in `ledger`. `replay` says what is
        kept of `step`, if it has failed before."""
        state = self._state
        state.stuck_at, self.are_given = None, False
        self._waits_for_nobody()
        before = state.ledger
        self._behind = before if before is not None and restart is None else None
        self.history.goes_on_from(step)
        state.view, state.step = view, step
        self._catch_up()
        self._followers.committed()  # maybe by the others' word alone
        state.ledger = ledger
        if restart is not None:
            state.restarts.append((restart, step))
        state.replay, state.stopped = replay, False
        self.cuts.take_over(view, step)
        self.seen_paces.took_over(view)
        for statement in self._mail.take_over(view, replay):
            with contextlib.suppress(PeerFault):
                self.prepared(statement)
        self._place.take_over(view)
        self._steps.forget_work_of_others(view.layers_of(self._tools.me))
        self._tools.stores.donor.take_over(view)
        self._safe_before = self.tell_safe_step()  # less if fellows died, whoever comes next
        if self.stays_done(view, step):
            self._say_done()
        state.wake.set()

    def stays_done(self, view: View, step: int) -> bool:
        """Whether the run is complete and somebody has gone home. Those that stay have all of its
        last state between them, and too little memory to look at it again, which would change
        nothing."""
        is_last = self.done.is_set() and step == self._spec.total_steps
        return is_last and isinstance(view.plan, NoPlan) and not view.snapshot.lost_layers

    def _say_done(self) -> None:
        what = f"all {self._spec.total_steps:,} steps are committed"
        self._tools.status.say(State.DONE, what)

    def wake(self) -> None:
        """A member has said that it is active. A peer that has all Prepared waits for that
        alone."""
        self._state.wake.set()

    def _catch_up(self) -> None:
        """A peer without a stage may take over before it has seen the last step of the old view."""
        ledger = self._behind
        while ledger is not None and ledger.step < self._state.step:
            if (outcome := ledger.next_outcome()) is None:
                return
            self.history.record(outcome)
            self._followers.committed(outcome)
        self._behind = None

    def prepared(self, statement: Statement) -> None:
        """Raises `PeerFault`."""
        prepared = statement.prepared
        state, ledger = self._state, self._state.ledger
        if self._behind is not None and prepared.view == self._behind.view:
            self._behind.record(statement)
            self._catch_up()
        elif ledger is not None and prepared.view == ledger.view:
            is_ahead = prepared.step >= ledger.step + STEPS_AHEAD_LIMIT
            if not is_ahead or self._tools.me in ledger.plan.stage_holders():
                self._record(ledger, statement)  # nobody can be ahead of a stage-holder
            else:
                self._skip(ledger, statement)
                if prepared.step < ledger.step + STEPS_AHEAD_LIMIT:
                    ledger.record(statement)
            state.wake.set()
        elif ledger is None or prepared.view.number > ledger.view.number:
            self._mail.keep_early(statement)

    def audited(self, sender: str, said: Claimed | Audited) -> None:
        """Raises `PeerFault`."""
        self._steps.audits.receive(sender, said)

    def shown(self, sender: str, said: ShownClaims, verify: Verify) -> None:
        """Raises `PeerFault`."""
        self._steps.audits.show(sender, said, verify)

    def hear_work(self, sender: str, work: Work) -> None:
        """Take in where another stage-holder stands."""
        self._steps.audits.hear_work(sender, work)

    def find_part(self, digest: str) -> bytes | memoryview | None:
        """Bytes of this peer's own work of the open step, for an audit."""
        return self._steps.audits.find(digest)

    async def counted(self) -> None:
        """Let the step that all have prepared commit, before more is said of the next ones."""
        ledger = self._state.ledger
        for _ in range(TURNS_LIMIT):
            if ledger is None or ledger.frozen or not ledger.may_commit or ledger.missing:
                return
            await asyncio.sleep(0)

    def _skip(self, ledger: Ledger, statement: Statement) -> None:
        """Raises `PeerFault`."""
        found = ledger.says_ahead(statement)
        if found is not None:
            self._outlet.skip_to(*found)
            self._state.step = ledger.step
            self._followers.committed()

    def _record(self, ledger: Ledger, statement: Statement) -> None:
        """Record a Prepared. Raises `PeerFault`; a peer that its own words convict has the step
        repeated without it."""
        try:
            ledger.record(statement)
        except PeerFault as fault:
            if ledger.has_refused(statement.signed):
                reason = f"{statement.prepared.peer_id}: {fault.cause}"
                asyncio.get_running_loop().call_soon(self._outlet.contradiction, reason)
            raise

    def admit(self, sender: str, header: FrameHeader) -> Awaitable[None] | None:
        """See `ViewMail.admit`."""
        return self._mail.admit(ViewId(header.view_number, header.view_digest), sender, header)

    async def frame(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """Raises `PeerFault` for what is not due.

        A peer that took over earlier may send before this one knows the view: its lane waits.
        """
        view = ViewId(header.view_number, header.view_digest)
        if not await self._mail.until_known(view, sender):
            return
        if header.kind is FrameKind.LAYER_STATE:
            self.cuts.frame(sender, header, payload)
        elif header.kind is FrameKind.LAYER_GRADIENT:
            self._followers.gradient(sender, header, payload)
        elif (mailbox := self._mail.mailbox(view)) is not None:
            mailbox.put(sender, header, payload)
            if header.kind is FrameKind.GRADIENT_PART:
                self.seen_paces.came(sender, header.step, len(payload))

    def following(self, sender: str, message: Following | CutBegun | CutReceipt) -> None:
        """Raises `PeerFault`."""
        require_bounded_part(message.view, sender)
        if isinstance(message, CutReceipt):
            self.cuts.receipt(sender, message)
        elif isinstance(message, CutBegun):
            self.cuts.begun(sender, message)
        else:
            self._followers.receive(sender, message)

    def stream_lost(self, sender: str) -> None:
        """What `sender` had sent of layers' states may not all arrive."""
        self._followers.stream_lost(sender)

    def undelivered(self, receiver: str) -> None:
        """Gradients on their way to a follower are lost. Pieces of a cut that were on their way to
        a guardian are sent anew when its receipt is late."""
        self._tools.stores.donor.undelivered(receiver)

    async def hand_over(self) -> None:
        """Wait, for a bounded time, until those who take over layers from here have them."""
        await self._tools.stores.donor.drain()

    async def close(self) -> None:
        self._is_closed = True
        self._followers.stop_following()
        self._followers.stop_guarding()
        self.cuts.stop()
        self._tools.stores.donor.close()

    # the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part in views; `done` is set when the last step is committed. Never ends."""
        state = self._state
        while True:
            view = state.view
            if state.step > self._spec.total_steps and not self.done.is_set():
                self._say_done()
                self.done.set()
            elif state.step <= self._spec.total_steps and not self._is_still_done:
                self.done.clear()  # a failure has cost the last steps: they are computed again
            if state.restarts:
                await self._restarting.do(*state.restarts[0])
            elif (
                self.done.is_set() or state.stopped or view is None or isinstance(view.plan, NoPlan)
            ):
                await self._idle()
            elif view.plan.stage_of(self._tools.me) is None:
                ends = self._spec.audit.follow_steps, self._spec.total_steps
                why = spare_in_short(view.snapshot, self._tools.me, state.step, *ends)
                self._tools.status.say(State.SPARE, why)
                await self._watch(view)
            else:
                with contextlib.suppress(Stopped):
                    state.fetches = True
                    try:
                        await self._place.have_states(view, view.plan)
                    finally:
                        state.fetches = False
                    if state.view is view:
                        await self._steps.run(view, view.plan, self._mail.of_stage(view.id))

    @property
    def _is_still_done(self) -> bool:
        return self._state.view is not None and self.stays_done(self._state.view, self._state.step)

    async def _idle(self) -> None:
        """No steps happen: give state to whoever asks, until something changes.

        A guardian without a plan lets its donors go once it has the last step of the view before.
        """
        state = self._state
        await self._place.offer_states()
        guardian = self._followers.guardian
        if guardian is None or state.stopped:
            await state.wait()
            return
        if not guardian.missing and not state.late(guardian.layers):
            self._followers.stop_guarding()
        await state.wait(GUARDIAN_POLL_S)

    async def _watch(self, view: View) -> None:
        """As a spare: learn the outcomes, and guard what one member holds alone."""
        state = self._state
        state.memory.keep_only(())
        self._place.guard(view)
        while not state.is_over(view) and state.step <= self._spec.total_steps:
            outcome = state.ledger.next_outcome() if state.ledger else None
            if outcome is None:
                await self._place.offer_states()
                await state.wait()
                continue
            self.history.record(outcome)
            self._place.drop_unwanted()
            self._outlet.states_changed()
            state.step = outcome.step + 1
            self.cuts.committed(view, outcome)
            self.seen_paces.committed()
            self._outlet.committed(outcome)
            self._followers.committed(outcome)
            state.forget_reduced(outcome.step)
            await self._outlet.settled()  # or it would go on counting in a view that is over
