"""State of layers on its way out, while training goes on.

A follower asks for layers. At the next step boundary the donor offers each layer's state as a blob,
and from then on sends the reduced gradient of every step and says when the step is committed. The
follower fetches the state once and replays the optimizer, so it catches up without anyone waiting
for it.

    early    of a view that this peer does not know yet, in which its place may need the layers
    asked    until the step boundary of its view at which the state is offered
    fed      gradients and commits, in order, as fast as the follower takes them
    closed   another view has taken over: what is queued is still sent, nothing is added
    gone     the follower has what it wants, cannot be reached, or has been quiet for too long
"""

import asyncio
import logging
from collections.abc import Collection
from functools import partial
from typing import Any, NamedTuple, Protocol

from p2p_dtfm.core.cost_model.guardians import queued_bytes_limit
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.schedule.pieces import CHUNK_ELEMENTS
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import FollowEnded, FollowLayers, LayerOffered, LayersCommitted
from p2p_dtfm.daemon.state_transfer.made_of_states import MadeOfStates
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.state_transfer.places import KnownPlaces
from p2p_dtfm.daemon.state_transfer.subscription import Subscription
from p2p_dtfm.daemon.state_transfer.witnesses import WitnessDesk
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.bulk import to_its_end
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, Payload
from p2p_dtfm.ports import rarely
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.tensor_bytes import tensor_to_bytes

QUEUED_MESSAGES_LIMIT = 4096
SUBSCRIPTIONS_LIMIT = 4
"""Subscriptions of one follower: for its place in the next view, as a guardian, and those being
closed."""
CLOSED_LIMIT_S = 60.0
"""How long a follower may take to say that it has what it wants, after its view took over and all
that is for it has been sent."""
LEAST_BYTES_PER_S = 62_500
"""Over a thinner line a peer that leaves does not wait for all that it still has to send."""
OVER = "that view is over here"

log = logging.getLogger("p2p_dtfm.donor")
Tensor = Any


class StateTransport(Protocol):
    """What a donor needs of `net.streams.bulk.BulkPlane`."""

    async def send(
        self, peer_id: str, lane: str, header: FrameHeader, payload: Payload
    ) -> None: ...


PUTS_LIMIT = 4
"""How often one state is put: a follower that was offered the same bytes may leave meanwhile, and
the file goes with it."""

_Key = tuple[str, ViewId, bool]
"""A follower, the view for which it follows, and whether from the takeover of that view on."""


class _Written(NamedTuple):
    blob: str
    size_bytes: int


class Donor:
    """`offers` keeps layers' bytes where the blob exchange finds them, until followers have
    them."""

    def __init__(
        self, messenger: Messenger, transport: StateTransport, compute: Compute, offers: Offers
    ) -> None:
        self._messenger = messenger
        self._transport = transport
        self._compute = compute
        self._offers = offers
        self._view: ViewId | None = None
        self._places = KnownPlaces()
        self._written: MadeOfStates[_Written] = MadeOfStates()
        """What is written stays until the next step, even if those that asked for it have left."""
        self._copies: dict[int, tuple[int, Tensor, Tensor]] = {}
        """Copies of this step's reduced gradients, by layer: step, gradient, copy. A follower that
        asks again and again costs no more of them."""
        self._subscriptions: dict[_Key, Subscription] = {}
        self._workers: dict[_Key, asyncio.Task[None]] = {}
        self._done: dict[tuple[str, ViewId], int] = {}
        """The request with which each follower last said that it has what it wanted in a view. That
        request may come after the word."""
        self._changed = asyncio.Event()
        """Set when fewer follow, or more of what is for them has been sent."""
        self._is_closed = False
        self.desk = WitnessDesk(messenger, compute, self._places)

    # what followers say

    def subscribe(self, follower: str, request: FollowLayers) -> None:
        """A follower asks for the layers that it needs in a view. The request with the highest
        number counts, whichever comes first. Raises `PeerFault` where its place there does not need
        these layers."""
        view = request.view
        needs = self._places.needs(follower, view, request.layers)
        if needs is False:
            raise PeerFault("asks for layers that its place does not need", follower)
        key = (follower, view, request.from_takeover)
        if self._is_overtaken(key, request.number):
            return
        self._drop(key)
        if self._is_closed or (needs is None and not self._places.may_come(view)):
            self._messenger.tell(follower, FollowEnded(view, request.number, OVER))
            return
        mine = [other for other in self._subscriptions if other[0] == follower]
        for oldest in mine[: len(mine) + 1 - SUBSCRIPTIONS_LIMIT]:
            self._drop(oldest)
        subscription = self._subscriptions[key] = Subscription(request, needs is True)
        self._workers[key] = asyncio.create_task(self._feed(key, subscription))

    def _is_overtaken(self, key: _Key, number: int) -> bool:
        """Whether the follower has asked anew since, or wants nothing any more."""
        before = self._subscriptions.get(key)
        is_old = before is not None and number <= before.request.number
        return is_old or number <= self._done.get(key[:2], 0)

    def unsubscribe(self, follower: str, view: ViewId, number: int) -> None:
        """The follower has what it wanted with its request `number`."""
        self._note_done(follower, view, number)
        for key, subscription in list(self._subscriptions.items()):
            if key[:2] == (follower, view) and subscription.request.number <= number:
                self._drop(key)

    def _note_done(self, follower: str, view: ViewId, number: int) -> None:
        """Of each member the last few are kept: whoever speaks of a view chooses its number."""
        if not self._places.has(follower):
            return
        self._done[follower, view] = max(number, self._done.pop((follower, view), 0))
        its = [key for key in self._done if key[0] == follower]
        for oldest in its[:-SUBSCRIPTIONS_LIMIT]:
            del self._done[oldest]

    def arrived(self, follower: str, view: ViewId) -> None:
        """The guardian has the states that it was offered; it goes on with gradients."""
        subscription = self._subscriptions.get((follower, view, True))
        if subscription is not None and subscription.blobs:
            subscription.lacks_room = False
            blobs, subscription.blobs = subscription.blobs, set()
            self._remove_unless_wanted(blobs)

    # what the trainer says

    def agreed(self, view: View) -> None:
        """This view is to follow the one in force."""
        self._places.agreed(view)
        self._look_at_early_ones()

    def take_over(self, view: View) -> None:
        """From now on steps happen in `view`: what was for earlier ones is sent to its end."""
        self._view = view.id
        self._places.took_over(view)
        self._done = {
            of: number
            for of, number in self._done.items()
            if of[1].number >= view.id.number and self._places.has(of[0])
        }
        self._forget_step()
        self._look_at_early_ones()
        self._forget_early_ones_of_strangers()
        for key, subscription in list(self._subscriptions.items()):
            follower, follower_view, from_takeover = key
            stays = follower_view == view.id and from_takeover
            if stays or follower_view.number > view.id.number:
                continue
            if self._places.has(follower):
                self._close(subscription)
            else:  # it was lost, or has left: should it come back, it asks anew
                self._drop(key)

    def _look_at_early_ones(self) -> None:
        """Another view is known: its early requests can be judged."""
        self.desk.look_at_early_ones()
        for key, subscription in list(self._subscriptions.items()):
            if subscription.is_known:
                continue
            follower, view, _ = key
            needs = self._places.needs(follower, view, subscription.request.layers)
            subscription.is_known = needs is True
            if needs is False:
                self._end(key, subscription, "its place there does not need these layers")
            elif needs is None and not self._places.may_come(view):
                self._end(key, subscription, OVER)

    def _forget_early_ones_of_strangers(self) -> None:
        """End the early requests of peers that are no members. Whoever asks chooses a view's
        number, and one far ahead would be waited for always."""
        self.desk.forget_early_ones_of_strangers()
        for key, subscription in list(self._subscriptions.items()):
            if not subscription.is_known and not self._places.has(key[0]):
                self._end(key, subscription, "it is no member")

    def _close(self, subscription: Subscription) -> None:
        if not subscription.closed:
            subscription.closed = True
            subscription.queue.put_nowait(None)

    @property
    def has_new_followers(self) -> bool:
        return any(s.pending and self._is_due(s) for s in self._subscriptions.values())

    def _is_due(self, subscription: Subscription) -> bool:
        """Whether it may be offered states now: before its takeover an unplanned view may yet
        change them."""
        request = subscription.request
        is_time = not request.from_takeover or request.view == self._view
        is_open = not (subscription.closed or subscription.lacks_room)
        return subscription.is_known and is_open and is_time

    async def offer(
        self, states: dict[int, LayerState], version: int, coming: Collection[int] = ()
    ) -> None:
        """At a step boundary: offer states at `version` to those that have not got them. Layers
        that are still `coming` here are offered later."""
        await self.desk.tell(states, version)
        for key, subscription in list(self._subscriptions.items()):
            pending = subscription.pending if self._is_due(subscription) else []
            never = [layer for layer in pending if layer not in states and layer not in coming]
            if never:
                self._end(key, subscription, f"layer {never[0]} is not held here")
                continue
            for state in filter(None, map(states.get, pending)):
                if state.version == version and not await self._offer(key, subscription, state):
                    break

    async def _offer(self, key: _Key, subscription: Subscription, state: LayerState) -> bool:
        """Offer one state. Returns whether the subscription is still there, and there is room for
        more."""
        layer, version, blob, size_bytes = state.layer, state.version, "", 0
        await rarely.lingers("offer late")
        if subscription.request.layers[layer] != version:
            try:
                blob, size_bytes = await self._write(state)
            except OSError as error:
                if subscription.blobs:  # first it is to fetch what lies there for it
                    subscription.lacks_room = True
                else:
                    self._end(key, subscription, f"its state cannot be kept for it: {error}")
                return False
            subscription.blobs.add(blob)
        if self._subscriptions.get(key) is not subscription:
            self._remove_unless_wanted(subscription.blobs)
            return False
        if layer not in subscription.offered:
            subscription.offered.add(layer)
            subscription.step_bytes += state.parameters.nbytes  # as its gradient has
        request = subscription.request
        offered = LayerOffered(request.view, request.number, layer, version, blob, size_bytes)
        self._put(key, subscription, offered)
        return True

    async def _write(self, state: LayerState) -> _Written:
        """The state as a file on offer. Raises `OSError`."""
        written = self._written.get(state)
        if written is None:
            version, payload = state.version, await self._compute.run(state.to_bytes)
            of_end = state.layer in (0, layer_count(state.spec) - 1)
            for _ in range(PUTS_LIMIT):
                blob = await self._put_offer(payload, of_end)
                if self._offers.find(blob) is not None:
                    break  # else one of the same bytes went while it was put
            written = _Written(blob, len(payload))
            before = self._written.put(state, version, written)
            self._remove_unless_wanted({each.blob for each in before})
        return written

    async def _put_offer(self, payload: memoryview, of_end: bool) -> str:
        """Put a state on offer. Where there is no room, states that nobody fetches now make room
        for it.

        Raises `OSError`.
        """
        put = partial(self._offers.put_beside, payload, of_end, self._compute.advanced)
        try:
            return await put()
        except OSError:
            self._remove_unless_wanted({each.blob for each in self._written.clear()})
            return await put()

    def _forget_step(self) -> None:
        self._copies.clear()
        self._remove_unless_wanted({each.blob for each in self._written.clear()})

    def reduced(self, step: int, reduced: dict[int, Tensor], stays: bool = False) -> None:
        """Reduced gradients of `step`, by layer: any while the step is computed, and all once it
        is. Unless a gradient `stays` as it is, a copy is made for those that have not got it."""
        due = {
            key: {n for n in s.offered & set(reduced) if s.fed.get(n) != step}
            for key, s in self._subscriptions.items()
            if not s.closed
        }
        wanted = {layer for layers in due.values() for layer in layers}
        held = {n: reduced[n] if stays else self._copy(step, n, reduced[n]) for n in sorted(wanted)}
        for key, layers in due.items():
            subscription = self._subscriptions[key]
            subscription.fed |= dict.fromkeys(layers, step)
            gradients = {layer: held[layer] for layer in sorted(layers)}
            if gradients:
                self._put(key, subscription, (step, gradients), _size_bytes(gradients))

    def _copy(self, step: int, layer: int, gradient: Tensor) -> Tensor:
        known = self._copies.get(layer)
        if known is None or known[0] != step or known[1] is not gradient:
            known = self._copies[layer] = step, gradient, gradient.clone()
        return known[2]

    def committed(self, outcome: StepOutcome) -> None:
        """Call it after `reduced` of the same step, and before the takeover that follows."""
        self._forget_step()
        for key, subscription in list(self._subscriptions.items()):
            if subscription.offered and not subscription.closed:
                view, number = subscription.request.view, subscription.request.number
                message = LayersCommitted(view, number, outcome.step, outcome.gradient_norm)
                self._put(key, subscription, message)

    async def drain(self, deadline_s: float = CLOSED_LIMIT_S) -> None:
        """Wait until all followers have said that they have what they want. That ends after a
        bounded time, or once nothing has happened for so long.

        Guardians are waited for, too: what one guards may be its own place once this peer has left.
        """
        queued_bytes = sum(each.queued_bytes for each in self._subscriptions.values())
        try:
            async with asyncio.timeout(deadline_s + queued_bytes / LEAST_BYTES_PER_S):
                while self._subscriptions:
                    self._changed.clear()
                    async with asyncio.timeout(deadline_s):
                        await self._changed.wait()
        except TimeoutError:
            late = sorted({follower for follower, _, _ in self._subscriptions})
            log.warning("left before %s had all they asked for", ", ".join(late))

    def close(self) -> None:
        """A peer that asks for layers afterwards, while this one goes, is told that it gets
        none."""
        self._is_closed = True
        for key in list(self._subscriptions):
            self._drop(key)
        self._forget_step()

    def undelivered(self, follower: str) -> None:
        """A stream to a follower broke with gradients on their way."""
        for key, subscription in list(self._subscriptions.items()):
            if key[0] == follower and subscription.offered:
                self._end(key, subscription, "gradients on their way to it are lost")

    # the queue of each follower

    def _put(self, key: _Key, subscription: Subscription, item: Any, size_bytes: int = 0) -> None:
        subscription.queued_bytes += size_bytes
        is_full = subscription.queue.qsize() >= QUEUED_MESSAGES_LIMIT
        limit_bytes = queued_bytes_limit(subscription.step_bytes)
        if is_full or subscription.queued_bytes > limit_bytes or rarely.happens("far behind"):
            behind = f"{subscription.queue.qsize()} messages, {subscription.queued_bytes} bytes"
            self._end(key, subscription, f"it is {behind} behind")
            return
        subscription.queue.put_nowait(item)

    def _end(self, key: _Key, subscription: Subscription, reason: str) -> None:
        if self._subscriptions.get(key) is not subscription:
            return  # it has asked anew
        log.warning("stops feeding %s: %s", key[0], reason)
        request = subscription.request
        self._messenger.tell(key[0], FollowEnded(request.view, request.number, reason))
        self._drop(key)

    def _drop(self, key: _Key) -> None:
        subscription = self._subscriptions.pop(key, None)
        worker = self._workers.pop(key, None)
        if worker is not None:
            worker.cancel()
        if subscription is not None:
            self._remove_unless_wanted(subscription.blobs)
        self._changed.set()

    def _remove_unless_wanted(self, blobs: set[str]) -> None:
        """Remove those of these states that are offered to no follower and are not of this step."""
        wanted = {blob for other in self._subscriptions.values() for blob in other.blobs}
        wanted |= {written.blob for written in self._written.all()}
        for blob in blobs - wanted:
            self._offers.remove(blob)

    async def _feed(self, key: _Key, subscription: Subscription) -> None:
        follower = key[0]
        while (item := await subscription.queue.get()) is not None:
            if isinstance(item, LayerOffered | LayersCommitted):
                self._messenger.tell(follower, item)
                continue
            step, gradients = item
            try:
                for layer, gradient in gradients.items():
                    await self._send_gradient(follower, key[1], step, layer, gradient)
            except (Unreachable, Refused) as error:
                self._end(key, subscription, f"gradients do not reach it: {error}")
                return
            except Exception:  # else the follower would wait for ever for what nobody sends
                log.exception("bug while feeding %s", follower)
                self._end(key, subscription, "gradients cannot be sent to it")
                return
            subscription.queued_bytes -= _size_bytes(gradients)
        await asyncio.sleep(CLOSED_LIMIT_S)
        self._drop(key)

    async def _send_gradient(
        self, follower: str, view: ViewId, step: int, layer: int, gradient: Tensor
    ) -> None:
        for index, start in enumerate(range(0, len(gradient), CHUNK_ELEMENTS)):
            chunk = gradient[start : start + CHUNK_ELEMENTS]
            header = FrameHeader(
                view_number=view.number,
                view_digest=view.snapshot,
                step=step,
                kind=FrameKind.LAYER_GRADIENT,
                index=index,
                layer=layer,
                codec="fp32",
                dtype="float32",
                shape=tuple(chunk.shape),
            )
            payload = tensor_to_bytes(chunk)
            await to_its_end(self._transport.send(follower, "state", header, payload))
            self._changed.set()


def _size_bytes(gradients: dict[int, Tensor]) -> int:
    return sum(gradient.nbytes for gradient in gradients.values())
