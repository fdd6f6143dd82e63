"""The place of this peer in the present view and the next: the layers it needs, and gets."""

import asyncio
import logging
import math
from collections.abc import Collection
from typing import Any, TypeVar

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Stopped, Tools, TrainerState
from p2p_dtfm.ports import now, rarely

GUARDIAN_GRACE_S = 3.0
"""How long a layer that is guarded here may take to catch up before it is asked for anew."""

Result = TypeVar("Result")

log = logging.getLogger("p2p_dtfm")


class PlaceInView:
    """An unplanned view takes over first, and its layers come while its first step waits. The
    layers of a planned view come while steps go on, and then this peer says synced."""

    def __init__(
        self, tools: Tools, outlet: Outlet, state: TrainerState, followers: Followers, cuts: Cuts
    ) -> None:
        self._tools = tools
        self._outlet = outlet
        self._state = state
        self._followers = followers
        self._cuts = cuts
        self._has_settled = True
        """Whether all states that the present view wants here are here."""
        self._next_view: View | None = None
        self._wanted: set[int] = set()
        self._wanted_next: set[int] = set()

    def agreed(self, view: View, discard: bool) -> None:
        """Bring the layers that the next view wants here; then say synced."""
        if self._has_settled or not view.snapshot.planned:
            self._followers.stop_following()
        if discard:
            self._state.restarts.clear()
            self._state.states.clear()
            self._cuts.clear()
            self._state.memory.keep_only(())
        self._state.wake.set()
        self._next_view = view if view.snapshot.planned else None
        if self._has_settled:
            self._prepare_next_view()

    def take_over(self, view: View) -> None:
        self._wanted_next = set()
        self._has_settled = isinstance(view.plan, NoPlan) or not view.layers_of(self._tools.me)
        follower = self._followers.follower
        if follower is not None:
            follower.taken_over = follower.view.id == view.id

    def _prepare_next_view(self) -> None:
        """Follow what the next planned view wants here; not before the present one has started."""
        view, self._next_view = self._next_view, None
        if view is None:
            return
        me = self._tools.me
        guarded = view.guarded_by(me) & view.guarded_before_takeover(self._state.view)
        self._wanted_next = guarded | set(view.layers_of(me))
        missing = self._wanted_next - self._kept_up()
        if missing:
            self._state.memory.forget(self._moved_on(missing))
            self._followers.follow(view, missing)
        else:
            self._outlet.synced(view.id)

    def _moved_on(self, layers: set[int]) -> set[int]:
        """The layers that others move on, among those that no commit here does: all of these, where
        steps happen."""
        view = self._state.view
        rests = view is not None and isinstance(view.plan, NoPlan)
        return self._state.late(layers) if rests else layers

    def _kept_up(self) -> set[int]:
        """Layers here whose states every commit moves on: of this peer's stage, or guarded.

        A layer that was handed over stays for a step, but is no longer what its holder has.
        """
        view, guardian = self._state.view, self._followers.guardian
        kept = set(view.layers_of(self._tools.me)) if view is not None else set()
        if guardian is not None:
            kept |= guardian.layers - guardian.missing
        return kept & set(self._state.states)

    def guard(self, view: View) -> None:
        """The states for this place are here: guard what others hold alone."""
        mine = self._followers.guard(view)
        self._wanted = set(view.layers_of(self._tools.me)) | mine
        self._outlet.states_changed()

    def drop_unwanted(self) -> None:
        """A step has committed in this view, so everyone has what it needed from this peer."""
        unwanted = set(self._state.states) - self._wanted - self._wanted_next
        for layer in unwanted - self._followers.catching_up:
            self._cuts.outlives(self._state.states.pop(layer))

    def leave_views(self) -> None:
        """This peer is in no view any more: nobody moves on what it guards, and the next view waits
        for no layers of the last one."""
        for layer in self._followers.guarded:
            self._state.states.pop(layer, None)
        self._has_settled, self._next_view = True, None

    async def have_states(self, view: View, plan: Plan) -> None:
        """Wait until every layer of this peer's stage is at the step that comes."""
        state, followers = self._state, self._followers
        mine = plan.layers_of(self._tools.me)
        for layer in mine:
            if state.step == 0 and layer not in state.states:
                making = asyncio.create_task(self._tools.stores.initial.state(layer))
                state.states[layer] = await self.offering_until(making, view)
        await self._brought(view, mine)
        await rarely.lingers("states late")
        while wrong := await self._unlike(view):
            log.warning("asks anew for layers %s: they are not what others have", sorted(wrong))
            followers.stop_following()
            for layer in wrong:
                del state.states[layer]
            await self._brought(view, mine)
        await self.offering_until(asyncio.create_task(self._make_ready(mine)), view)
        self.guard(view)
        followers.stop_following()  # for a view that was never taken over
        self._has_settled = True
        self._prepare_next_view()

    async def _unlike(self, view: View) -> set[int]:
        """Layers that gradients have moved on here and that others have otherwise: none in an
        honest swarm."""
        asking = asyncio.create_task(self._followers.unlike(view))
        return await self.offering_until(asking, view)

    async def _brought(self, view: View, mine: Collection[int]) -> None:
        """Wait until all of these layers are here, as of the step that comes. Raises `Stopped`."""
        state, followers = self._state, self._followers
        grace_end_s = now.monotonic_s() + GUARDIAN_GRACE_S
        due_s = now.monotonic_s() + followers.last_steps_s(view)
        has_waited = False
        while late := state.late(mine):
            has_waited = True
            self._refuse_wrong(view, late, is_due=now.monotonic_s() >= due_s)
            guardian = followers.guardian
            guarded = guardian.layers if guardian is not None else frozenset()
            rest = late - followers.brought_for(view)
            grace_s = grace_end_s - now.monotonic_s() if rest and rest <= guarded else 0.0
            if rest and grace_s <= 0:
                followers.stop_guarding()
                state.memory.forget(late)
                followers.follow(view, late)
                due_s = min(due_s, now.monotonic_s() + followers.last_steps_s(view))
            text = f"waits for {counted(len(late), 'layer')} as of step {state.step}"
            self._tools.status.say(State.SYNCING, text)
            await self.offer_states()
            limits_s = (it for it in (grace_s, due_s - now.monotonic_s()) if 0 < it < math.inf)
            await state.wait(min(limits_s, default=None))
            if state.is_over(view):
                raise Stopped
        if has_waited:  # where others are busy it takes a while until they have said so
            what = f"its layers are here as of step {state.step}: asks whether others have the same"
            self._tools.status.say(State.SYNCING, what)

    def _refuse_wrong(self, view: View, late: set[int], is_due: bool) -> None:
        """Ask others for states that never come to the step at which all wait for this peer.

        Of a step to come the other holders say nothing, so the donor's word stood alone. A donor
        that keeps the last steps back says nothing either, and this peer would be taken for the one
        that holds up all. `is_due`: these steps should be here by now. Until then what others
        send comes first: to ask anew drops all that is on its way here.
        """
        held, step = self._state.states, self._state.step
        wrong = {layer for layer in late & held.keys() if held[layer].version > step}
        if is_due:
            wrong |= self._followers.not_moved_on(view, late)
        elif (late - wrong) & self._followers.brought_for(view):
            return
        if wrong:
            text = "asks others for layers %s, which do not come to step %d"
            log.warning(text, sorted(wrong), step)
            self._followers.refuse(wrong)
            for layer in wrong:
                held.pop(layer, None)

    async def _make_ready(self, mine: Collection[int]) -> None:
        """Complete this peer's layers and move them to where they are computed; move what is
        guarded to the host's memory."""
        compute, states = self._tools.compute, self._state.states
        for layer in mine:
            await self._tools.stores.initial.complete(states[layer])
        for layer in sorted(states, key=lambda layer: layer in mine):  # makes room before it takes
            if (held := states.get(layer)) is not None:
                await compute.run(held.move, compute.device if layer in mine else None)

    async def offering_until(self, task: asyncio.Task[Result], view: View) -> Result:
        """The result of `task`; meanwhile states are offered to those that wait for them to do
        their part.

        Raises `Stopped` where the view is over first, or the task was cancelled: a caller that then
        waited for what this view owes would wait for ever.
        """
        state = self._state
        task.add_done_callback(_heard)
        try:
            while not task.done() and not state.is_over(view):
                await state.done_or_woken(task)
                state.wake.clear()
                if not task.done():
                    await self.offer_states()
            if state.is_over(view) or task.cancelled():
                raise Stopped
            return task.result()
        finally:
            task.cancel()
            state.wake.set()

    async def offer_states(self) -> None:
        """Offer states to new followers; after a failure only once the next view has put them
        right."""
        state, donor = self._state, self._tools.stores.donor
        version = min(state.step, self._tools.spec.total_steps)
        is_asked = donor.has_new_followers or donor.desk.is_due(version)
        if is_asked and not state.stopped and not state.restarts:
            coming = state.view.layers_of(self._tools.me) if state.view is not None else ()
            await donor.offer(state.states, version, coming)


def _heard(task: asyncio.Task[Any]) -> None:
    """Take what a task raises as its view ends: nobody else asks for it."""
    if not task.cancelled():
        task.exception()
