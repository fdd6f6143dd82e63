"""The states that come here while others train on them: for this peer's place, or to be guarded."""

import asyncio
import itertools
from collections.abc import Callable

from p2p_dtfm.core.guardians import Receipts
from p2p_dtfm.core.view import View
from p2p_dtfm.daemon.follower import Follower, FollowerTools, OnGradient
from p2p_dtfm.daemon.status import State
from p2p_dtfm.daemon.trainer_state import Outlet, Tensor, Tools, TrainerState
from p2p_dtfm.daemon.wire import (
    FollowDone,
    FollowEnded,
    FollowLayers,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
)
from p2p_dtfm.net.frames import FrameHeader

Following = FollowLayers | LayerOffered | LayersCommitted | LayerReceipt | FollowEnded | FollowDone


class Followers:
    """At most one follower for the place that comes, and one guardian of others' layers."""

    def __init__(self, tools: Tools, outlet: Outlet, state: TrainerState) -> None:
        self.follower: Follower | None = None
        self.guardian: Follower | None = None
        self.receipts: Receipts | None = None
        """Of the guardians of layers that this peer holds alone."""
        self._tools = tools
        self._outlet = outlet
        self._state = state
        self._following: asyncio.Task[None] | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._request_numbers = itertools.count(1)

    # following ----------------------------------------------------------------------------------

    def follow(self, view: View, layers: set[int]) -> None:
        """Bring these layers for this peer's place in `view`."""
        self.follower = self._new(view, layers, self._progress)
        self._following = self._run(self.follower)

    def stop_following(self) -> None:
        if self._following is not None and self.follower is not None:
            self._following.cancel()
            self.follower.stop()
        self._following = self.follower = None

    def _progress(self) -> None:
        follower = self.follower
        assert follower is not None
        self._outlet.states_changed()
        if not follower.missing:
            self._outlet.synced(follower.view.id)
        elif self._state.view is None:
            self._tools.status.say(State.SYNCING, follower.behind)
        self._state.wake.set()

    def _new(
        self,
        view: View,
        layers: set[int],
        on_progress: Callable[[], None],
        on_gradient: OnGradient | None = None,
    ) -> Follower:
        tools = self._tools
        follower_tools = FollowerTools(
            me=tools.me,
            spec=tools.spec,
            states=self._state.states,
            courier=tools.courier,
            blobs=tools.blobs,
            compute=tools.compute,
            numbers=self._request_numbers,
        )
        return Follower(view, layers, follower_tools, on_progress, on_gradient)

    def _run(self, follower: Follower) -> asyncio.Task[None]:
        task = asyncio.create_task(follower.run())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """It ends by being cancelled; anything else must not leave this peer waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._state.fail(error)

    # guarding -----------------------------------------------------------------------------------

    def guard(self, view: View) -> set[int]:
        """Follow the layers of `view` that one other member holds alone and this one guards.

        Returns those layers.
        """
        self.stop_guarding()
        me, guards = self._tools.me, view.guards
        mine = {layer for layer, guardian in guards.items() if guardian == me}
        alone = {layer: peer for layer, peer in guards.items() if layer in view.layers_of(me)}
        self.receipts = Receipts(view.id, alone)
        if mine:
            self.guardian = self._new(view, mine, self._outlet.states_changed, self._guarded)
            self._guarding = self._run(self.guardian)
        return mine

    def stop_guarding(self) -> None:
        if self._guarding is not None and self.guardian is not None:
            self._guarding.cancel()
            self.guardian.stop()
        self._guarding = self.guardian = None

    def _guarded(self, holder: str, layer: int, step: int, gradient: Tensor) -> None:
        """A step's gradient of a guarded layer is here: keep it, and give a receipt."""
        guardian = self.guardian
        if guardian is None or self._state.stopped:
            return
        view = guardian.view.id
        self._state.reduced.setdefault((view, step), {})[layer] = gradient
        self._outlet.reduced(step, {layer})
        self._tools.courier.tell(holder, LayerReceipt(view, step, (layer,)))

    # what arrives -------------------------------------------------------------------------------

    def gradient(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """A reduced gradient of a layer that is followed or guarded. Raises `PeerFault`."""
        for follower in self._all():
            if header.layer in follower.layers:
                follower.gradient(sender, header, payload)

    def receive(self, sender: str, message: Following) -> None:
        """Raises `PeerFault`."""
        donor = self._tools.donor
        if isinstance(message, FollowLayers):
            donor.subscribe(sender, message)
            if self.receipts is not None and message.from_takeover:
                self.receipts.begins_again(sender)
            self._state.wake.set()
        elif isinstance(message, FollowDone):
            donor.unsubscribe(sender, message.view, message.number)
        elif isinstance(message, LayerReceipt):
            self._receive_receipt(sender, message)
        elif (follower := self._that_asked(sender, message.number)) is None:
            return  # the answer to an earlier request
        elif isinstance(message, LayerOffered):
            follower.offered(sender, message)
        elif isinstance(message, LayersCommitted):
            follower.committed(sender, message)
        else:
            follower.ended(sender, message)

    def stream_lost(self, sender: str) -> None:
        """What `sender` had sent of layers' states may not all arrive."""
        for follower in self._all():
            follower.stream_lost(sender)

    def _receive_receipt(self, sender: str, message: LayerReceipt) -> None:
        if self.receipts is not None:
            self.receipts.receipt(sender, message.view, message.step, message.layers)
            if self.receipts.received_all_of(sender):
                self._tools.donor.arrived(sender, message.view)
            self._state.wake.set()

    def _that_asked(self, sender: str, number: int) -> Follower | None:
        for follower in self._all():
            if follower.has_asked(sender, number):
                return follower
        return None

    def _all(self) -> list[Follower]:
        return [item for item in (self.follower, self.guardian) if item is not None]
