"""The states that come here while others train on them: for this peer's place, or to be guarded."""

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType

from p2p_dtfm.core.liveness.pace import (
    GRADIENTS_ON_THEIR_WAY,
    bytes_per_s_from,
    fetch_bytes_per_s,
)
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES
from p2p_dtfm.core.recovery.receipts import Receipts
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import (
    ConfirmLayers,
    FollowDone,
    FollowEnded,
    FollowLayers,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
    StateDigest,
)
from p2p_dtfm.daemon.state_transfer.following.donor_choice import donors_of
from p2p_dtfm.daemon.state_transfer.following.follower import Follower
from p2p_dtfm.daemon.state_transfer.following.giving import note_slow
from p2p_dtfm.daemon.state_transfer.following.replaying import MayRoll, OnGradient
from p2p_dtfm.daemon.state_transfer.state_tools import FollowerTools
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Tensor, Tools, TrainerState
from p2p_dtfm.net.streams.frames import FrameHeader
from p2p_dtfm.train.model.gpt import layer_count

NOT_NAMED = "this run leaves its data, its first and its last layer to members that it names"
Following = (
    FollowLayers
    | ConfirmLayers
    | StateDigest
    | LayerOffered
    | LayersCommitted
    | LayerReceipt
    | FollowEnded
    | FollowDone
)


CATCH_UP_S = 3.0
"""How long a layer that is to be guarded may take to come to the view's first step, by what its old
donors still send. It is one step if that is longer. Then its holder is asked for its state."""
LAST_STEPS_S = 2.0
"""How long the last steps of a place's layers may take, beside the time that the lines take over
which they come. The others wait for `FLOOR_NS` beside it. Within the rest the states come from
others."""


class Followers:
    """At most one follower for the place that comes, and one guardian of others' layers."""

    def __init__(self, tools: Tools, outlet: Outlet, state: TrainerState) -> None:
        self.follower: Follower | None = None
        self.guardian: Follower | None = None
        self.receipts: Receipts | None = None
        """Receipts from the guardians of layers that this peer holds alone."""
        self.guarded: frozenset[int] = frozenset()
        """Layers that this peer guards, or is about to."""
        self._tools = tools
        self._outlet = outlet
        self._state = state
        self._tasks: dict[Follower, asyncio.Task[None]] = {}
        self._ending: list[Follower] = []
        """Followers of the view before, until what is guarded next has caught up."""
        self._beginning: asyncio.Task[None] | None = None
        self._progressed = asyncio.Event()
        self._request_numbers = itertools.count(1)
        self._slow_donors: Counter[str] = Counter()

    # following ----------------------------------------------------------------------------------

    def follow(self, view: View, layers: set[int]) -> None:
        """Bring these layers for this peer's place in `view`."""
        self.stop_following()
        self.follower = self._new(view, layers, self._progress)
        present = self._state.view
        self.follower.taken_over = present is not None and present.id == view.id

    def brought_for(self, view: View) -> frozenset[int]:
        """Layers that are on their way for this peer's place in `view`."""
        follower = self.follower
        return follower.layers if follower and follower.view.id == view.id else frozenset()

    async def unlike(self, view: View) -> set[int]:
        """Layers that were brought for this peer's place in `view`, as of its first step, and are
        not what others have."""
        follower = self.follower
        if follower is None or follower.view.id != view.id:
            return set()
        return await follower.unlike(self._state.step)

    def last_steps_s(self, view: View) -> float:
        """How long the last steps of what was brought for this peer's place in `view` may take:
        less than the others wait for this peer. Each donor has the time of its own line. All
        together have that of one line, as the others count it: what several give comes over this
        peer's line, which may be no better than most."""
        follower, owed_bytes, place_bytes = self.follower, Counter[str](), 0
        if follower is None or follower.view.id != view.id:
            return math.inf
        place, workload = view.layers_of(self._tools.me), view.snapshot.workload
        for layer, donors in follower.came_from.items():
            parameters = workload.cost(layer).parameter_count
            layer_bytes = GRADIENTS_ON_THEIR_WAY * FLOAT_BYTES * parameters
            place_bytes += layer_bytes if layer in place else 0
            for donor in donors:
                owed_bytes[donor] += layer_bytes
        lines_s = [size / bytes_per_s_from(it, view) for it, size in owed_bytes.items()]
        return LAST_STEPS_S + max(place_bytes / fetch_bytes_per_s(view), *lines_s, 0.0)

    def not_moved_on(self, view: View, late: set[int]) -> set[int]:
        """Those of the late layers that were brought for `view`, and that others have as well."""
        follower, me = self.follower, self._tools.me
        if follower is None:
            return set()
        here = (late & self.brought_for(view)) - follower.missing
        gave = {layer: follower.came_from.get(layer, set()) for layer in here}
        return {it for it in here if set(donors_of(view, it, me, taken_over=True)) - gave[it]}

    def refuse(self, layers: Collection[int]) -> None:
        """What was given of these layers is of no use: whoever gave it is asked last from now
        on."""
        follower = self.follower
        if follower is not None and not follower.layers.isdisjoint(layers):
            for layer in layers:
                for donor in sorted(follower.came_from.get(layer, ())):
                    note_slow(self._slow_donors, donor)
            self.stop_following()

    def stop_following(self) -> None:
        self._stop(self.follower)
        self.follower = None

    def _progress(self) -> None:
        follower = self.follower
        self._changed()
        if follower is None:
            return  # the follower is ending
        if not follower.missing:
            self._outlet.synced(follower.view.id)
        if self._state.view is None:
            self._tools.status.say(State.SYNCING, follower.behind)

    def _changed(self) -> None:
        self._outlet.states_changed()
        self._progressed.set()
        self._state.wake.set()

    def _new(
        self,
        view: View,
        layers: set[int],
        on_progress: Callable[[], None],
        on_gradient: OnGradient | None = None,
        may_roll: MayRoll = lambda step: True,
        came_from: Mapping[int, Collection[str]] = MappingProxyType({}),
    ) -> Follower:
        tools = self._tools
        follower_tools = FollowerTools(
            me=tools.me,
            spec=tools.spec,
            states=self._state.states,
            net=tools.net,
            compute=tools.compute,
            numbers=self._request_numbers,
            keep_frozen=tools.stores.initial.keep,
            slow=self._slow_donors,
        )
        follower = Follower(
            view, layers, follower_tools, on_progress, on_gradient, may_roll, came_from
        )
        self._tasks[follower] = self._state.watched(follower.run())
        return follower

    def _stop(self, follower: Follower | None) -> None:
        if follower is not None:
            self._tasks.pop(follower).cancel()
            follower.stop()

    # guarding -----------------------------------------------------------------------------------

    def guard(self, view: View) -> set[int]:
        """Follow the layers of `view` that one other member holds alone and this one guards.

        Returns those layers; none where guardians lag, which follow nothing
        (`daemon.trainer.cut_transfers`). If the last gradient of a layer to be guarded is still on
        its way, what brought states until now goes on for a moment.
        """
        me, lags = self._tools.me, view.cut_pace is not None
        mine = view.guarded_by(me)
        alone = {} if lags else view.guardians_of(me)
        self.receipts = Receipts(view.id, alone, view.guarded_at_once)
        self.guarded = frozenset(mine)
        self._cancel_beginning()
        if self.guardian is not None:
            self._ending.append(self.guardian)
            self.guardian = None
        if self.follower is not None and self.follower.view.id == view.id:
            self._ending.append(self.follower)
            self.follower = None
        if mine and ((self._state.step == 0 and not lags) or self._are_coming(mine)):
            self._beginning = self._state.watched(self._begin_soon(view, mine))
        else:
            self._begin(view, mine)
        return set() if lags else mine

    @property
    def catching_up(self) -> frozenset[int]:
        """Layers of which the last gradient of the view before is still waited for."""
        return self.guarded if self._beginning is not None else frozenset()

    def _are_coming(self, layers: set[int]) -> bool:
        """Whether some of these layers are late, and all late ones are on their way."""
        late = self._state.late(layers)
        here = {layer for item in self._ending for layer in item.layers - item.missing}
        return bool(late) and late <= here

    async def _begin_soon(self, view: View, mine: set[int]) -> None:
        """Where training begins, make the states, as anybody can. Else wait for the last
        gradients."""
        state = self._state
        for layer in sorted(mine):
            if state.step == 0 and view.cut_pace is None and layer not in state.states:
                # beside what this peer itself does, which its status tells
                made = await self._tools.stores.initial.state(layer, tells=False)
                state.states.setdefault(layer, made)
        step_s = view.plan.predicted_step_ns / 1e9 if isinstance(view.plan, Plan) else 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(CATCH_UP_S, step_s)):
                while self._are_coming(mine):
                    self._progressed.clear()
                    await self._progressed.wait()
        self._beginning = None
        if state.view is view:
            self._begin(view, mine)

    def _begin(self, view: View, mine: set[int]) -> None:
        came_from = {it: peers for each in self._ending for it, peers in each.came_from.items()}
        self._end_ending()
        if mine and view.cut_pace is None:
            guards = (self._guarded, self._is_committed)
            self.guardian = self._new(view, mine, self._changed, *guards, came_from)
        self._changed()  # a peer that takes no steps may let the guardian go in time

    def _cancel_beginning(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
        self._beginning = None

    def _end_ending(self) -> None:
        for follower in self._ending:
            self._stop(follower)
        self._ending = []

    def stop_guarding(self) -> None:
        self._cancel_beginning()
        self._end_ending()
        self._stop(self.guardian)
        self.guardian, self.guarded = None, frozenset()

    def _guarded(self, holder: str, layer: int, step: int, gradient: Tensor) -> None:
        """A step's gradient of a guarded layer is here: keep it, and give a receipt."""
        guardian = self.guardian
        if guardian is None or self._state.stopped:
            return
        view = guardian.view.id
        self._state.keep_reduced(view, step, {layer: gradient}, self._outlet)
        self._tools.net.messenger.tell(holder, LayerReceipt(view, step, (layer,)))

    def _is_committed(self, step: int) -> bool:
        """Whether the step is committed here as well. If its holder died now, this peer could show
        nobody a state whose step's commit it cannot tell."""
        return step < self._state.step

    def committed(self, outcome: StepOutcome | None = None) -> None:
        """A step is committed, as far as this peer knows. With None it does not know what came of
        the step."""
        for follower in filter(None, (self.guardian, *self._ending)):
            if outcome is not None:
                follower.note_seen(outcome.step, outcome.gradient_norm)
            follower.go_on()

    # what arrives -------------------------------------------------------------------------------

    def gradient(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """A reduced gradient of a layer that is followed or guarded. Raises `PeerFault`."""
        view = ViewId(header.view_number, header.view_digest)
        for follower in self._all():
            if header.layer in follower.layers and follower.view.id == view:
                follower.gradient(sender, header, payload)

    def receive(self, sender: str, message: Following) -> None:
        """Raises `PeerFault`."""
        donor = self._tools.stores.donor
        if isinstance(message, FollowLayers | ConfirmLayers | LayerReceipt):
            self._require_layers(sender, message)
        if isinstance(message, FollowLayers):
            donor.subscribe(sender, message)
            if self.receipts is not None and message.from_takeover:
                self.receipts.begins_again(sender)
            self._state.wake.set()
        elif isinstance(message, ConfirmLayers):
            donor.desk.asked(sender, message)
            self._state.wake.set()
        elif isinstance(message, StateDigest):
            for follower in self._all():
                follower.confirmed(sender, message)
        elif isinstance(message, FollowDone):
            donor.unsubscribe(sender, message.view, message.number)
        elif isinstance(message, LayerReceipt):
            self._receive_receipt(sender, message)
        elif (asking := self._that_asked(sender, message.number)) is None:
            return  # the answer to an earlier request
        elif isinstance(message, LayerOffered):
            asking.offered(sender, message)
        elif isinstance(message, LayersCommitted):
            asking.committed(sender, message)
        else:
            asking.ended(sender, message)

    def _require_layers(
        self, sender: str, message: FollowLayers | ConfirmLayers | LayerReceipt
    ) -> None:
        """Raises `PeerFault` for a message that names a layer that there is not, or one of them
        twice: one message has room for a million names, and each would have an answer. So does a
        request for a layer that is left to others."""
        spec, layers = self._tools.spec, message.layers
        count = layer_count(spec)
        if len(layers) > count or len(set(layers)) < len(layers):
            raise PeerFault(f"names {counted(len(layers), 'layer')} of {count}", sender)
        if any(not 0 <= layer < count for layer in layers):
            raise PeerFault("names a layer that there is not", sender)
        asks = not isinstance(message, LayerReceipt)
        if asks and spec.privacy.withheld(sender, count) & set(layers):
            raise PeerFault(NOT_NAMED, sender)

    def stream_lost(self, sender: str) -> None:
        """What `sender` had sent of layers' states may not all arrive."""
        for follower in self._all():
            follower.stream_lost(sender)

    def _receive_receipt(self, sender: str, message: LayerReceipt) -> None:
        if self.receipts is not None:
            self.receipts.receipt(sender, message.view, message.step, message.layers)
            if self.receipts.received_all_of(sender):
                self._tools.stores.donor.arrived(sender, message.view)
            self._state.wake.set()

    def _that_asked(self, sender: str, number: int) -> Follower | None:
        for follower in self._all():
            if follower.has_asked(sender, number):
                return follower
        return None

    def _all(self) -> list[Follower]:
        return [item for item in (self.follower, self.guardian, *self._ending) if item is not None]
