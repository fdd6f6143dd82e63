"""State of layers on its way to peers that need it, while training goes on.

A follower asks a donor for layers. At its next step boundary the donor offers each layer's state
as a blob, and from then on sends the reduced gradient of every step and says when the step is
committed. The follower fetches the state once and replays the optimizer, so it catches up without
anyone waiting for it.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.core.snapshot import ViewId
from p2p_dtfm.core.step import StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.core.workload import workload_of
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.daemon.courier import Courier
from p2p_dtfm.daemon.mailbox import CHUNK_ELEMENTS
from p2p_dtfm.daemon.wire import FollowEnded, FollowLayers, LayerOffered, LayersCommitted
from p2p_dtfm.net.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.frames import FrameHeader, FrameKind, Payload
from p2p_dtfm.train.data import BlobStore, is_digest
from p2p_dtfm.train.layer_state import LayerState, state_bytes_limit
from p2p_dtfm.train.optimizer import clip_scale, learning_rate
from p2p_dtfm.train.reduction import tensor_from_bytes, tensor_to_bytes

QUEUED_STEPS_LIMIT = 64
COMMITTED_LIMIT = 4096
FINISH_DEADLINE_S = 60.0
RETRY_S = 1.0

log = logging.getLogger("p2p_dtfm.following")
Tensor = Any


class Transport(Protocol):
    async def send(
        self, peer_id: str, lane: str, header: FrameHeader, payload: Payload
    ) -> None: ...


def apply_outcome(
    spec: RunSpec, state: LayerState, gradient: Tensor, step: int, gradient_norm: float
) -> None:
    """The update that every holder and follower of a layer makes for a committed step."""
    assert state.version == step, (state.layer, state.version, step)
    scale = clip_scale(gradient_norm, spec.optimizer.clip_norm)
    state.apply(gradient, scale, learning_rate(spec, step))


def donors_of(view: View, layer: int, me: str) -> list[str]:
    """Who has a layer's state from which `view` goes on, best first."""
    snapshot = view.snapshot
    if snapshot.planned and snapshot.present is not None:
        return [peer for peer in snapshot.present.holders(layer) if peer != me]
    versions = {item.peer_id: item.version for item in snapshot.held if item.layer == layer}
    newest = max(versions.values(), default=-1)
    return sorted(peer for peer, version in versions.items() if version == newest and peer != me)


_Key = tuple[str, ViewId]
"""A follower, and the view for which it follows."""


# the donor ------------------------------------------------------------------------------------


@dataclass
class _Subscription:
    view: ViewId
    layers: set[int]
    versions: dict[int, int]
    """What the follower has already."""
    offered: set[int] = field(default_factory=set)
    blobs: set[str] = field(default_factory=set)
    queue: asyncio.Queue[Any] = field(default_factory=lambda: asyncio.Queue(QUEUED_STEPS_LIMIT))


class Donor:
    """`blobs` keeps layers' bytes where the blob exchange finds them, until they are followed."""

    def __init__(
        self, courier: Courier, transport: Transport, compute: Compute, blobs: BlobStore
    ) -> None:
        self._courier = courier
        self._transport = transport
        self._compute = compute
        self._blobs = blobs
        self._subscriptions: dict[_Key, _Subscription] = {}
        self._workers: dict[_Key, asyncio.Task[None]] = {}

    def subscribe(self, follower: str, request: FollowLayers) -> None:
        """A follower of an agreed view asks for layers; a new request replaces the old one."""
        key = (follower, request.view)
        self._drop(key)
        subscription = _Subscription(request.view, set(request.layers), dict(request.layers))
        self._subscriptions[key] = subscription
        self._workers[key] = asyncio.create_task(self._feed(key, subscription))

    @property
    def has_new_followers(self) -> bool:
        return any(s.layers - s.offered for s in self._subscriptions.values())

    async def offer(self, states: dict[int, LayerState]) -> None:
        """At a step boundary: offer the state to those who have not got it."""
        for key, subscription in list(self._subscriptions.items()):
            for layer in sorted(subscription.layers - subscription.offered):
                state = states.get(layer)
                if state is None:
                    self._end(key, subscription, f"layer {layer} is not held here")
                    break
                version, blob, size_bytes = state.version, "", 0
                if subscription.versions.get(layer) != version:
                    payload = await self._compute.run(state.to_bytes)
                    try:
                        blob = await asyncio.to_thread(self._blobs.put_bytes, payload)
                    except OSError as error:
                        self._end(key, subscription, f"its state cannot be written: {error}")
                        break
                    size_bytes = len(payload)
                    subscription.blobs.add(blob)
                if self._subscriptions.get(key) is not subscription:
                    self._release(subscription)
                    break
                subscription.offered.add(layer)
                offered = LayerOffered(subscription.view, layer, version, blob, size_bytes)
                self._put(key, subscription, offered)

    def reduced(self, step: int, states: dict[int, LayerState]) -> None:
        """The gradient buffers hold the reduced gradient of `step`, and it is not yet applied."""
        wanted = {n for s in self._subscriptions.values() for n in s.offered} & set(states)
        copies = {layer: states[layer].gradient_vector().clone() for layer in wanted}
        for key, subscription in list(self._subscriptions.items()):
            gradients = {n: copies[n] for n in sorted(subscription.offered & set(copies))}
            if gradients:
                self._put(key, subscription, (step, gradients))

    def committed(self, outcome: StepOutcome) -> None:
        for key, subscription in list(self._subscriptions.items()):
            if subscription.offered:
                message = LayersCommitted(subscription.view, outcome.step, outcome.gradient_norm)
                self._put(key, subscription, message)

    async def finish(self, keep: ViewId | None = None) -> None:
        """A view has taken over: send what is queued, for a bounded time, and forget.

        Subscriptions for the view `keep` stay.
        """
        ended = {k: s for k, s in self._subscriptions.items() if s.view != keep}
        for key, subscription in ended.items():
            self._put(key, subscription, None)
        workers = [self._workers.pop(key) for key in ended if key in self._workers]
        for key in ended:
            self._subscriptions.pop(key, None)
        if workers:
            _, late = await asyncio.wait(workers, timeout=FINISH_DEADLINE_S)
            for worker in late:
                worker.cancel()
        for (follower, view), subscription in ended.items():
            self._release(subscription)
            self._courier.tell(follower, FollowEnded(view, "a view has taken over"))

    def arrived(self, follower: str, view: ViewId) -> None:
        """The follower has the states that it was offered; it goes on with gradients."""
        subscription = self._subscriptions.get((follower, view))
        if subscription is not None and subscription.blobs:
            blobs, subscription.blobs = subscription.blobs, set()
            self._remove_unless_wanted(blobs)

    def unsubscribe(self, follower: str, view: ViewId) -> None:
        """The follower has what it wanted."""
        self._drop((follower, view))

    def close(self) -> None:
        for key in list(self._subscriptions):
            self._drop(key)

    def _put(self, key: _Key, subscription: _Subscription, item: Any) -> None:
        if subscription.queue.full():
            self._end(key, subscription, f"it is {QUEUED_STEPS_LIMIT} messages behind")
            return
        subscription.queue.put_nowait(item)

    def _end(self, key: _Key, subscription: _Subscription, reason: str) -> None:
        if self._subscriptions.get(key) is not subscription:
            return  # it has asked anew, or its view has taken over
        log.warning("stops feeding %s: %s", key[0], reason)
        self._courier.tell(key[0], FollowEnded(subscription.view, reason))
        self._drop(key)

    def _drop(self, key: _Key) -> None:
        subscription = self._subscriptions.pop(key, None)
        worker = self._workers.pop(key, None)
        if worker is not None:
            worker.cancel()
        if subscription is not None:
            self._release(subscription)

    def _release(self, subscription: _Subscription) -> None:
        """Remove the states that were offered to this follower and to nobody else."""
        self._remove_unless_wanted(subscription.blobs)

    def _remove_unless_wanted(self, blobs: set[str]) -> None:
        wanted = {blob for other in self._subscriptions.values() for blob in other.blobs}
        for blob in blobs - wanted:
            self._blobs.remove(blob)

    async def _feed(self, key: _Key, subscription: _Subscription) -> None:
        follower = key[0]
        while True:
            item = await subscription.queue.get()
            if item is None:
                return
            if isinstance(item, LayerOffered | LayersCommitted):
                self._courier.tell(follower, item)
                continue
            step, gradients = item
            try:
                for layer, gradient in gradients.items():
                    await self._send_gradient(follower, subscription.view, step, layer, gradient)
            except (Unreachable, Refused) as error:
                self._end(key, subscription, f"gradients do not reach it: {error}")
                return

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
            await self._transport.send(follower, "state", header, tensor_to_bytes(chunk))


# the follower ---------------------------------------------------------------------------------


class Follower:
    """Brings the states of some layers for one agreed view. Run `run`; it ends when cancelled.

    `states` gets each layer as it arrives; `on_progress` is called whenever more is there.
    `on_gradient(donor, layer, step, gradient)` hears of each whole reduced gradient that rolls a
    state here forward.
    """

    def __init__(
        self,
        view: View,
        me: str,
        spec: RunSpec,
        missing: set[int],
        states: dict[int, LayerState],
        courier: Courier,
        blobs: BlobExchange,
        compute: Compute,
        scratch: Path,
        on_progress: Callable[[], None],
        on_gradient: Callable[[str, int, int, Tensor], None] | None = None,
        of_present_view: bool = False,
    ) -> None:
        self.view = view
        self.missing = missing
        self._me = me
        self._spec = spec
        self._workload = workload_of(spec)
        self._states = states
        self._courier = courier
        self._blobs = blobs
        self._compute = compute
        self._scratch = scratch
        self._on_progress = on_progress
        self._on_gradient = on_gradient
        self._of_present_view = of_present_view
        self._noted: set[tuple[int, int]] = set()
        self._layers = frozenset(missing)
        self._donor_of: dict[int, str] = {}
        self._offers: asyncio.Queue[LayerOffered] = asyncio.Queue()
        self._committed: dict[tuple[str, int], float] = {}
        self._gradients: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Ask, fetch, replay; forever."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            for layer in sorted(self._layers):
                self._choose_donor(layer)
            for donor in sorted(set(self._donor_of.values())):
                group.create_task(self._ask(donor))
            group.create_task(self._fetch_offers())
            group.create_task(self._replay())

    def _choose_donor(self, layer: int) -> None:
        donors = self._donors(layer)
        assert donors, f"nobody holds layer {layer}"
        self._donor_of[layer] = donors[layer % len(donors)]

    def _donors(self, layer: int) -> list[str]:
        """The holders of the view itself for a guardian, else those from whom the view starts."""
        plan = self.view.plan
        if self._of_present_view and isinstance(plan, Plan):
            return [peer for peer in plan.holders(layer) if peer != self._me]
        return donors_of(self.view, layer, self._me)

    async def _ask(self, donor: str) -> None:
        wanted = sorted(layer for layer, peer in self._donor_of.items() if peer == donor)
        held = self._states
        layers = {n: held[n].version if n in held else -1 for n in wanted}
        while True:
            try:
                await self._courier.ask(donor, FollowLayers(self.view.id, layers))
                return
            except (Unreachable, Refused) as error:
                log.info("asks again for state: %s", error)
                await asyncio.sleep(RETRY_S)

    async def _ask_another(self, sender: str) -> None:
        """After a pause, ask the next donor of each layer that `sender` was to give."""
        await asyncio.sleep(RETRY_S)
        for layer, peer in list(self._donor_of.items()):
            if peer == sender:
                donors = self._donors(layer)
                after = donors.index(sender) + 1 if sender in donors else 0
                self._donor_of[layer] = donors[after % len(donors)]
        for donor in sorted(set(self._donor_of.values())):
            await self._ask(donor)

    # what arrives

    def offered(self, sender: str, message: LayerOffered) -> None:
        """Raises `PeerFault` for an offer that nobody asked for."""
        if self._donor_of.get(message.layer) != sender:
            raise PeerFault(f"offers layer {message.layer}, for which it was not asked", sender)
        has_blob = message.blob != ""  # else the state is here already
        size_bytes = message.size_bytes
        if has_blob and not 0 < size_bytes <= state_bytes_limit(self._spec, message.layer):
            raise PeerFault(f"offers a layer of {size_bytes} bytes", sender)
        if has_blob and not is_digest(message.blob):
            raise PeerFault("offers a layer under a name that is no digest", sender)
        if self._offers.qsize() > 4 * len(self._layers):
            raise PeerFault("offers layers faster than they can be taken", sender)
        self._offers.put_nowait(message)

    def committed(self, sender: str, message: LayersCommitted) -> None:
        if sender not in self._donor_of.values():
            raise PeerFault("feeds a peer that did not ask", sender)
        if not 0 <= message.gradient_norm < math.inf:
            raise PeerFault(f"a gradient norm of {message.gradient_norm}", sender)
        self._committed[sender, message.step] = message.gradient_norm
        while len(self._committed) > COMMITTED_LIMIT:  # what came first was replayed long ago
            del self._committed[next(iter(self._committed))]
        self._wake.set()

    def ended(self, sender: str, message: FollowEnded) -> None:
        """The donor gave up on this follower: start again from a newer state."""
        log.warning("%s stopped feeding: %s", sender, message.reason)
        if self._group is not None and sender in self._donor_of.values():
            self._group.create_task(self._ask_another(sender))

    def gradient(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """A chunk of a layer's reduced gradient. Raises `PeerFault` if it is not due."""
        if self._donor_of.get(header.layer) != sender:
            raise PeerFault(f"a gradient of layer {header.layer}, not asked for", sender)
        length = self._workload.cost(header.layer).parameter_count
        start = header.index * CHUNK_ELEMENTS
        due = (min(CHUNK_ELEMENTS, length - start),)
        if start >= length or header.shape != due:
            raise PeerFault(f"gradient chunk {header.index} of shape {header.shape}", sender)
        if (header.codec, header.dtype) != ("fp32", "float32"):
            raise PeerFault(f"a gradient of {header.dtype} in {header.codec}", sender)
        steps = {step for layer, step in self._gradients if layer == header.layer}
        if header.step not in steps and len(steps) >= 2 * QUEUED_STEPS_LIMIT:
            raise PeerFault("feeds more steps than a follower can hold", sender)
        chunks = self._gradients.setdefault((header.layer, header.step), {})
        chunks[header.index] = tensor_from_bytes(payload, header.shape)
        self._wake.set()

    # work

    async def _fetch_offers(self) -> None:
        while True:
            offer = await self._offers.get()
            donor = self._donor_of[offer.layer]
            if not offer.blob:
                await self._take_as_held(offer, donor)
                continue
            target = self._scratch / f"layer-{offer.layer}-{offer.blob[:16]}"
            try:
                unique = list(dict.fromkeys([donor, *self._donors(offer.layer)]))
                await self._blobs.fetch(offer.blob, unique, target, offer.size_bytes)
                payload = await asyncio.to_thread(target.read_bytes)
                state = await self._compute.run(
                    LayerState.from_bytes, self._spec, offer.layer, payload
                )
            except (BlobUnavailable, PeerFault) as error:
                log.warning("state of layer %d: %s", offer.layer, error)
                await asyncio.sleep(RETRY_S)
                await self._ask(donor)
                continue
            finally:
                with contextlib.suppress(OSError):
                    target.unlink()
            self._states[offer.layer] = state
            self._arrived(offer.layer)

    async def _take_as_held(self, offer: LayerOffered, donor: str) -> None:
        state = self._states.get(offer.layer)
        if state is not None and state.version == offer.version:
            self._arrived(offer.layer)
        else:
            await asyncio.sleep(RETRY_S)
            await self._ask(donor)

    def _arrived(self, layer: int) -> None:
        self.missing.discard(layer)
        self._wake.set()
        self._on_progress()

    async def _replay(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            for layer in sorted(self._layers - self.missing):
                self._note_gradient(layer)
                while await self._replay_step(layer):
                    self._on_progress()
                    self._note_gradient(layer)

    def _note_gradient(self, layer: int) -> None:
        """Tell, once, that the next step's gradient of a layer is here whole."""
        if self._on_gradient is None:
            return
        state = self._states[layer]
        key = (layer, state.version)
        chunks = self._gradients.get(key, {})
        if key in self._noted or len(chunks) < -(-state.parameter_count // CHUNK_ELEMENTS):
            return
        self._noted = {noted for noted in self._noted if noted[0] != layer} | {key}
        self._on_gradient(self._donor_of[layer], layer, state.version, _join(chunks))

    async def _replay_step(self, layer: int) -> bool:
        state = self._states[layer]
        step = state.version
        norm = self._committed.get((self._donor_of[layer], step))
        chunks = self._gradients.get((layer, step), {})
        due = -(-state.parameter_count // CHUNK_ELEMENTS)
        if norm is None or len(chunks) < due:
            return False
        gradient = await self._compute.run(_join, chunks)
        await self._compute.run(apply_outcome, self._spec, state, gradient, step, norm)
        for old in [key for key in self._gradients if key[0] == layer and key[1] <= step]:
            del self._gradients[old]
        return True

    def release_donors(self) -> None:
        """Tell the donors that no more is needed."""
        for donor in sorted(set(self._donor_of.values())):
            self._courier.tell(donor, FollowEnded(self.view.id, "caught up"))

    def feeds_from(self, peer_id: str) -> bool:
        return peer_id in self._donor_of.values()

    @property
    def behind(self) -> str:
        """What is still missing, in words."""
        if self.missing:
            return f"{len(self.missing)} of {len(self._layers)} layers to fetch"
        return "replaying the latest steps"


def _join(chunks: dict[int, Tensor]) -> Tensor:
    ordered = [chunks[index] for index in sorted(chunks)]
    if len(ordered) == 1:
        return ordered[0]
    whole = ordered[0].new_empty(sum(len(chunk) for chunk in ordered))
    start = 0
    for chunk in ordered:
        whole[start : start + len(chunk)] = chunk
        start += len(chunk)
    return whole
