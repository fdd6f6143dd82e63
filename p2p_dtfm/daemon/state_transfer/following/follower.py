"""State of layers on its way in, while training goes on; `daemon.state_transfer.donor` is the other
end.

A follower asks a donor for each layer, fetches the state once, and replays the optimizer with the
gradients that follow. A donor that fails, or gives less than it could, is followed by the next one.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.byte_semaphore import ByteSemaphore
from p2p_dtfm.daemon.peers.wire import (
    FollowDone,
    FollowEnded,
    FollowLayers,
    LayerOffered,
    LayersCommitted,
    StateDigest,
)
from p2p_dtfm.daemon.state_transfer.following.donor_choice import (
    donors_of,
    guarded_from,
    holders_in,
)
from p2p_dtfm.daemon.state_transfer.following.giving import FETCHED_AT_ONCE, Giver, Givers
from p2p_dtfm.daemon.state_transfer.following.replaying import (
    Coming,
    MayRoll,
    OnGradient,
    Replaying,
)
from p2p_dtfm.daemon.state_transfer.following.rolled_layers import unlike_layers
from p2p_dtfm.daemon.state_transfer.state_tools import FollowerTools
from p2p_dtfm.daemon.state_transfer.witnesses import StateVotes, drawn, finite_state
from p2p_dtfm.daemon.telemetry.estimate import Estimate
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.net.streams.frames import FrameHeader
from p2p_dtfm.train.data import is_digest
from p2p_dtfm.train.model.layer_state import state_bytes_limit

FETCHED_LIMIT_BYTES = 256 << 20
"""States on their way: one layer from each of several donors, so that their uplinks add up."""
REASON_LIMIT = 200
RETRY_S = 1.0
LOOKS_EVERY_S = 0.5
"""How often a follower looks at what comes of a fetch, and of a request."""

log = logging.getLogger("p2p_dtfm.follower")


class Follower:
    """Brings the states of some layers for one agreed view. Run `run`; it ends when cancelled.

    `on_progress` is called whenever more is there. A guardian gives `on_gradient(donor, layer,
    step, gradient)`, which hears of each whole reduced gradient that rolls a state here forward.
    `may_roll(step)`: whether states may be moved on by that step, as far as this peer knows; call
    `go_on` when more may.
    """

    def __init__(
        self,
        view: View,
        layers: set[int],
        tools: FollowerTools,
        on_progress: Callable[[], None],
        on_gradient: OnGradient | None = None,
        may_roll: MayRoll = lambda step: True,
        came_from: Mapping[int, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """`came_from`: which peers have given what is here of these layers, if it was brought."""
        self.view = view
        self.layers = frozenset(layers)
        self.missing = set(layers)
        self.taken_over = False
        """Whether steps happen in the view already; said by the trainer."""
        self._estimate = Estimate(first=0)
        self._tools = tools
        self._on_progress = on_progress
        self._on_gradient = on_gradient
        self._from_takeover = on_gradient is not None or not view.snapshot.planned
        self._donor_of: dict[int, str] = {}
        self._request_of: dict[str, FollowLayers] = {}
        self._givers = Givers(view, tools.me, tools.slow)
        self._to_ask: dict[str, None] = {}
        self._asks = asyncio.Event()
        self._offers: asyncio.Queue[tuple[str, LayerOffered]] = asyncio.Queue()
        self._taken: dict[int, tuple[int, int]] = {}
        """By layer: the number of the request and the version of its newest offer."""
        self._fetches: dict[int, asyncio.Task[None]] = {}
        """The latest fetch of each layer."""
        self._room = ByteSemaphore(FETCHED_AT_ONCE, FETCHED_LIMIT_BYTES)
        self._votes = StateVotes()
        self.came_from = {it: set(peers) for it, peers in came_from.items() if it in layers}
        """By layer: the peers that gave its state, and the gradients that have moved it on."""
        coming = Coming(self.layers, self.missing, self._donor_of, self.came_from)
        self._replaying = Replaying(
            coming, tools, on_progress, on_gradient, may_roll, self._begin_again
        )
        self._asks_anew: set[int] = set()
        """Layers that are here, and not what their holder has, as far as that is known."""
        self._has_stopped = False

    async def run(self) -> None:
        """Ask, fetch, replay; forever."""
        for layer in sorted(self.layers):
            donors = self._donors(layer)
            assert donors, f"nobody holds layer {layer}"
            is_mine = self._tools.me in holders_in(self.view.plan, layer)
            first = layer % len(donors) if is_mine else 0
            self._donor_of[layer] = self._givers.best_of(donors[first:] + donors[:first])
            self._ask_soon(self._donor_of[layer])
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_donors())
            group.create_task(self._fetch_offers())
            group.create_task(self._watch_offers())
            group.create_task(self._replaying.run())

    # asking

    def _donors(self, layer: int) -> list[str]:
        if self._on_gradient is not None:
            return guarded_from(self.view, layer, self._tools.me)
        return donors_of(self.view, layer, self._tools.me, self.taken_over)

    def _ask_soon(self, donor: str) -> None:
        self._to_ask[donor] = None
        self._asks.set()

    async def _ask_donors(self) -> None:
        while True:
            await self._asks.wait()
            self._asks.clear()
            donors, self._to_ask = self._to_ask, {}
            self._ask_witnesses()
            await asyncio.gather(*map(self._ask, donors))  # one that is gone holds up no other
            await asyncio.sleep(RETRY_S)  # between one round of requests and the next

    async def _ask(self, donor: str) -> None:
        held = self._tools.states
        wanted = sorted(layer for layer, peer in self._donor_of.items() if peer == donor)
        if not wanted:
            return
        layers = {
            n: held[n].version if n in held and n not in self._asks_anew else -1 for n in wanted
        }
        number = next(self._tools.numbers)
        request = FollowLayers(self.view.id, number, layers, self._from_takeover)
        self._request_of[donor] = request
        self._givers.asked(self.missing & set(wanted))
        try:
            await self._tools.net.messenger.ask(donor, request)
        except (Unreachable, Refused) as error:
            log.info("asks for state: %s", error)
            self._turn_from(donor)

    def _witnesses(self, donor: str, layer: int) -> list[str]:
        """Others that have the layer when the donor gives it."""
        others = [peer for peer in self._donors(layer) if peer not in (donor, self._tools.me)]
        return drawn(others, f"{self.view.id} {self._tools.me} {layer}")

    def _ask_witnesses(self) -> None:
        of: dict[str, list[int]] = {}
        for layer in sorted(self.missing):
            donor = self._donor_of[layer]
            is_unsure = self._is_unsure(donor, layer)
            for peer in [donor] if is_unsure else self._witnesses(donor, layer):
                of.setdefault(peer, []).append(layer)
        for peer, asked in of.items():
            number = next(self._tools.numbers)
            self._tools.net.messenger.tell(peer, self._votes.ask(peer, self.view.id, number, asked))

    def confirmed(self, sender: str, message: StateDigest) -> None:
        """A holder says what it has of a layer. Raises `PeerFault`."""
        self._votes.said(sender, message)

    async def unlike(self, version: int) -> set[int]:
        """See `unlike_layers`."""
        unsure = self._replaying.unsure & (self.layers - self.missing)
        givers = {layer: self._donor_of.get(layer, "") for layer in unsure}
        return await unlike_layers(self.view, self._tools, self._votes, givers, version)

    def _turn_from(self, donor: str) -> None:
        """Ask the next donor of each layer that this one was to give."""
        self._request_of.pop(donor, None)
        self._givers.turned_from(donor)
        for layer in [layer for layer, peer in self._donor_of.items() if peer == donor]:
            self._turn_to_next(layer)

    def _turn_to_next(self, layer: int) -> None:
        donor, donors = self._donor_of[layer], self._donors(layer)
        after = donors.index(donor) + 1 if donor in donors else 0
        self._givers.offered(layer)
        self._donor_of[layer] = donors[after % len(donors)]
        self._ask_soon(self._donor_of[layer])

    def _leave(self, donor: str, layers: Iterable[int]) -> None:
        """Ask others, where there are any, for those of the layers that a donor has not given. The
        rest still comes from that donor, and so does what moves on with the steps."""
        comes = {layer for layer, fetch in self._fetches.items() if not fetch.done()}
        for layer in sorted((self.missing | comes).intersection(layers)):
            if self._donor_of[layer] == donor and self._has_others(donor, layer):
                self._stop_fetch(layer)
                self._turn_to_next(layer)
        if donor not in self._donor_of.values() and donor in self._request_of:
            number = self._request_of.pop(donor).number
            self._tools.net.messenger.tell(donor, FollowDone(self.view.id, number))

    def _has_others(self, donor: str, layer: int) -> bool:
        return any(peer != donor for peer in self._donors(layer))

    def _stop_fetch(self, layer: int) -> None:
        fetch = self._fetches.pop(layer, None)
        if fetch is not None and fetch is not asyncio.current_task():
            fetch.cancel()

    def has_asked(self, sender: str, number: int) -> bool:
        """Whether a message answers this follower's latest request to its sender."""
        return (asked := self._request_of.get(sender)) is not None and asked.number == number

    # what arrives

    def offered(self, sender: str, message: LayerOffered) -> None:
        """Raises `PeerFault` for an offer that cannot be of the layer asked for."""
        request = self._request_of.get(sender)
        if request is None or message.layer not in request.layers:
            raise PeerFault(f"offers layer {message.layer}, for which it was not asked", sender)
        if self._donor_of.get(message.layer) != sender:
            return  # it has been too slow with others, and somebody else is to give this one
        size_bytes, has_blob = message.size_bytes, message.blob != ""  # else it is here already
        if has_blob and not 0 < size_bytes <= state_bytes_limit(self._tools.spec, message.layer):
            raise PeerFault(f"offers a layer of {size_bytes} bytes", sender)
        if has_blob and not is_digest(message.blob):
            raise PeerFault("offers a layer under a name that is no digest", sender)
        of_request, version = self._taken.get(message.layer, (0, -1))
        if of_request == message.number and message.version <= version:
            return  # it is told again, as the answer was late: what is here may be newer by now
        self._taken[message.layer] = message.number, message.version
        self._givers.offered(message.layer, sender)
        if self._offers.qsize() > 4 * len(self.layers):
            raise PeerFault("offers layers faster than they can be taken", sender)
        self._offers.put_nowait((sender, message))

    def committed(self, sender: str, message: LayersCommitted) -> None:
        """Raises `PeerFault` for a gradient norm that is none."""
        self._replaying.committed(sender, message)

    def gradient(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """A chunk of a layer's reduced gradient. Raises `PeerFault` if it cannot be one."""
        self._replaying.take(sender, header, payload)

    def ended(self, sender: str, message: FollowEnded) -> None:
        """The donor gave up on this follower: start again from a newer state."""
        log.warning("%s stopped feeding: %s", sender, message.reason[:REASON_LIMIT])
        self._turn_from(sender)

    def stream_lost(self, donor: str) -> None:
        """A stream with a donor broke: what was on its way is gone."""
        if donor in self._donor_of.values():
            self._request_of.pop(donor, None)
            self._ask_soon(donor)

    def _begin_again(self, donor: str, reason: str) -> None:
        """Ask a donor's layers anew. What others give goes on: no donor can undo it."""
        log.warning("asks for newer states than %s gives: %s", donor, reason)
        self._replaying.drop(donor)
        self._turn_from(donor)

    # work

    async def _fetch_offers(self) -> None:
        """Fetch what is offered, several layers at once; a later offer of a layer replaces it."""
        async with asyncio.TaskGroup() as group:
            while True:
                donor, offer = await self._offers.get()
                self._stop_fetch(offer.layer)
                if offer.blob or self._has(offer.layer, offer.version):
                    take = self._fetch if offer.blob else self._take_own
                    self._fetches[offer.layer] = group.create_task(take(donor, offer))
                else:
                    self._leave(donor, [offer.layer])
                    self._ask_soon(donor)

    async def _watch_offers(self) -> None:
        """A donor that takes a request and offers nothing is as slow as one that gives nothing."""
        while True:
            await asyncio.sleep(LOOKS_EVERY_S)
            late: dict[str, list[int]] = {}
            give = {self._donor_of[n] for n, fetch in self._fetches.items() if not fetch.done()}
            for layer in sorted(self.missing):
                donor = self._donor_of[layer]
                if not self._has_others(donor, layer):
                    if donor not in give and self._givers.rests(layer, donor):
                        self._ask_soon(donor)
                elif self._givers.owes(layer, donor):
                    late.setdefault(donor, []).append(layer)
            for donor, layers in late.items():
                log.warning("%s offers none of layers %s: asks others", donor, layers)
                self._givers.too_slow(donor)
                self._leave(donor, layers)

    def _has(self, layer: int, version: int) -> bool:
        return (held := self._tools.states.get(layer)) is not None and held.version == version

    def _is_news(self, offer: LayerOffered) -> bool:
        """Whether the offer is newer. What is here may have moved on by gradients that are gone."""
        held, layer = self._tools.states.get(offer.layer), offer.layer
        if held is None or layer in self.missing or layer in self._asks_anew:
            return True
        return held.version < offer.version

    def _is_unsure(self, donor: str, layer: int) -> bool:
        """Whether a guarded layer came from others than its holder of now. When that holder asked
        whether it has what others have, this copy was not there."""
        is_foreign = bool(self.came_from.get(layer, set()) - {donor})
        return self._on_gradient is not None and is_foreign and layer in self._tools.states

    async def _take_own(self, donor: str, offer: LayerOffered) -> None:
        """What is offered is here: it counts once what is frozen of it is here as well."""
        if not self._is_unsure(donor, offer.layer) or await self._is_same(donor, offer):
            await self._tools.keep_frozen(offer.layer)
            self._arrived(offer.layer)

    async def _is_same(self, donor: str, offer: LayerOffered) -> bool:
        """Ask whether the donor has the same. Nothing moves the layer on before it has arrived."""
        tools, layer, held = self._tools, offer.layer, self._tools.states.get(offer.layer)
        own = await tools.compute.run(held.file_digest) if held is not None else b""
        said = await self._votes.word_of(donor, layer, offer.version) if own else None
        if self._has_stopped:
            return False
        if said == own:
            self.came_from[layer] = {donor}
            return True
        if said is not None:
            log.warning("what is guarded of layer %d is not what %s has", layer, donor)
            tools.states.pop(layer, None)
            self._on_progress()
        self._asks_anew.add(layer)
        self._ask_soon(donor)
        return False

    async def _fetch(self, donor: str, offer: LayerOffered) -> None:
        tools = self._tools
        async with self._room.taken(offer.size_bytes):
            try:
                payload = await self._take(donor, offer)
                if payload is None:
                    return
                state = await tools.compute.run(finite_state, tools.spec, offer.layer, payload)
            except (BlobUnavailable, PeerFault) as error:
                log.warning("state of layer %d: %s", offer.layer, error)
                self._givers.of(donor).failed()
                if isinstance(error, PeerFault) or donor in error.denied:
                    self._leave(donor, [offer.layer])
                self._ask_soon(donor)
                return
        witnesses = self._witnesses(donor, offer.layer)
        of = (offer.layer, offer.version, donor, offer.blob)
        if state.version != offer.version or not await self._votes.count(witnesses, *of):
            log.warning("refuses the state of layer %d that %s gives", offer.layer, donor)
            self._turn_from(donor)
            return
        await tools.keep_frozen(offer.layer)
        if not self._has_stopped and self._is_news(offer):
            tools.states[offer.layer] = state
            self.came_from[offer.layer] = {donor}
            self._asks_anew.discard(offer.layer)
            if witnesses and self._votes.has_only(donor, offer.layer, offer.version):
                self._replaying.unsure.add(offer.layer)
        self._arrived(offer.layer)

    async def _take(self, donor: str, offer: LayerOffered) -> bytes | None:
        """What the donor offers; None where others are asked for it instead."""
        giver = self._givers.of(donor)
        fetch = asyncio.create_task(self._fetch_bytes(donor, giver, offer))
        try:
            with giver.gives(offer.layer, offer.size_bytes):
                while not fetch.done():
                    if self._is_left(donor, giver, offer):
                        return None
                    await asyncio.wait({fetch}, timeout=LOOKS_EVERY_S)
            return fetch.result()
        finally:
            fetch.cancel()
            fetch.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def _fetch_bytes(self, donor: str, giver: Giver, offer: LayerOffered) -> bytes:
        """Fetch what is offered. Of several layers over a thin line each seems to be stuck, so a
        fetch goes on as long as the donor gives something. Raises `BlobUnavailable`."""
        donors = list(dict.fromkeys([donor, *self._donors(offer.layer)]))
        blob, size_bytes, blobs = offer.blob, offer.size_bytes, self._tools.net.blobs
        while True:
            before_bytes = giver.came_bytes
            try:
                return await blobs.fetch_bytes(blob, donors, size_bytes, on_came=giver.came)
            except BlobUnavailable as error:
                if donor in error.denied or giver.came_bytes == before_bytes:
                    raise

    def _is_left(self, donor: str, giver: Giver, offer: LayerOffered) -> bool:
        """Whether somebody else is asked for what is on its way."""
        of = (offer.layer, offer.version, donor, offer.blob)
        if self._votes.is_outvoted(self._witnesses(donor, offer.layer), *of):
            log.warning("refuses the state of layer %d that %s offers", offer.layer, donor)
            self._turn_from(donor)
            return True
        if not giver.is_late or not self._has_others(donor, offer.layer):
            return False
        log.warning("%s gives layer %d too slowly: asks others", donor, offer.layer)
        self._givers.too_slow(donor)
        self._leave(donor, self.layers)
        return True

    def _arrived(self, layer: int) -> None:
        if self._has_stopped:
            return
        self.missing.discard(layer)
        self._replaying.go_on()
        self._on_progress()

    def note_seen(self, step: int, norm: float) -> None:
        """See `Replaying.note_seen`."""
        self._replaying.note_seen(step, norm)

    def go_on(self) -> None:
        """States that were held back may be moved on."""
        self._replaying.go_on()

    def stop(self) -> None:
        """Tell the donors that no more is needed; from now on nothing changes here.

        `run`, which is cancelled as well, may get a turn before it hears of that.
        """
        self._has_stopped = True
        self._replaying.stop()
        for donor, request in sorted(self._request_of.items()):
            self._tools.net.messenger.tell(donor, FollowDone(self.view.id, request.number))

    @property
    def behind(self) -> str:
        """What is still missing, in words."""
        if self.missing:
            total, missing = len(self.layers), len(self.missing)
            left = self._estimate.words(total - missing, total)
            return f"{missing} of {total} layers to fetch{left}"
        return "its layers are here, and replay the latest steps until the view takes over"
