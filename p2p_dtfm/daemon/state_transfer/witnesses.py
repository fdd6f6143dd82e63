"""Whether a layer's state that a donor gives is the one that the other holders have.

A peer that asks one holder for a layer asks the others for digests of theirs, in the steps in which
the donor may give it. What a donor gives counts if more than half of those that speak of that
version, the donor among them, say the same. Where nobody else has the layer, the donor's word has
to do.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import ConfirmLayers, StateDigest
from p2p_dtfm.daemon.state_transfer.made_of_states import MadeOfStates
from p2p_dtfm.daemon.state_transfer.places import KnownPlaces
from p2p_dtfm.ports import rarely
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.finite import is_finite

VERSIONS_TOLD = 3
"""How many steps, one after the other, a holder tells of: a donor begins its own a moment earlier
or later."""
REQUESTS_LIMIT = 64
VIEWS_LIMIT = 2
"""Views of one sender: what it guards in the present view, and its place in the next."""
WITNESSES_LIMIT = 4
"""How many others are asked; more would only cost them time."""
LIMIT_S = 5.0
"""How long what has come waits for the other holders' word; then those that have spoken decide."""
SAID_LIMIT = 16
"""Digests of one layer that are remembered of each holder: what one tells takes the place of nobody
else's."""

log = logging.getLogger("p2p_dtfm.witnesses")


def drawn(holders: Sequence[str], by: str, limit: int = WITNESSES_LIMIT) -> list[str]:
    """As many of a layer's holders, as each asker draws them anew in each view. In a plan's order
    all would ask the same few, and colluders that are first in it would be most of these."""
    order = sorted(holders, key=lambda it: hashlib.blake2b(f"{by} {it}".encode()).digest())
    return order[:limit]


def finite_state(spec: RunSpec, layer: int, payload: bytes) -> LayerState:
    """A layer's state that a peer gives. Raises `PeerFault`."""
    state = LayerState.from_bytes(spec, layer, payload)
    if not all(map(is_finite, (state.parameters, state.first_moments, state.second_moments))):
        raise PeerFault(f"a state of layer {layer} that is not finite")
    return state


@dataclass
class _AskedWitness:
    message: ConfirmLayers
    is_known: bool
    """Whether its view is known, and the asking peer needs the layers in it."""
    versions: set[int] = field(default_factory=set)
    """The versions at which it was looked at."""
    told: set[tuple[int, int]] = field(default_factory=set)
    """Layers and versions that were told. A layer that still comes here is told once it is here."""

    def is_over(self, version: int) -> bool:
        return len(self.versions) >= VERSIONS_TOLD and version not in self.versions

    def untold(self, version: int) -> list[int]:
        if self.is_over(version):
            return []
        return [layer for layer in self.message.layers if (layer, version) not in self.told]


class WitnessDesk:
    """The side of a holder: at step boundaries it tells those that ask what it has."""

    def __init__(self, messenger: Messenger, compute: Compute, places: KnownPlaces) -> None:
        self._messenger = messenger
        self._compute = compute
        self._places = places
        self._requests: dict[tuple[str, ViewId], _AskedWitness] = {}
        self._digests: MadeOfStates[bytes] = MadeOfStates()

    def asked(self, sender: str, message: ConfirmLayers) -> None:
        """A later request replaces the sender's earlier one for the same view, whichever comes
        first; of too many the oldest goes. Raises `PeerFault` for layers that the sender's place
        does not need."""
        key = sender, message.view
        needs = self._places.needs(sender, message.view, message.layers)
        if needs is False:
            raise PeerFault("asks what layers are that its place does not need", sender)
        before = self._requests.get(key)
        if before is not None and before.message.number > message.number:
            return
        self._requests.pop(key, None)
        if needs is None and not self._places.may_come(message.view):
            return
        its = [other for other in self._requests if other[0] == sender]
        for oldest in its[: len(its) + 1 - VIEWS_LIMIT]:
            del self._requests[oldest]
        while len(self._requests) >= REQUESTS_LIMIT:
            del self._requests[next(iter(self._requests))]
        if rarely.happens("not asked"):
            return
        self._requests[key] = _AskedWitness(message, needs is True)

    def look_at_early_ones(self) -> None:
        """Another view is known; somebody may have asked about it before."""
        for (sender, view), request in list(self._requests.items()):
            needs = self._places.needs(sender, view, request.message.layers)
            request.is_known = needs is True
            if needs is False or (needs is None and not self._places.may_come(view)):
                del self._requests[sender, view]

    def forget_early_ones_of_strangers(self) -> None:
        early = (key for key, request in self._requests.items() if not request.is_known)
        for key in [key for key in early if not self._places.has(key[0])]:
            del self._requests[key]

    def is_due(self, version: int) -> bool:
        """Whether somebody waits for what is here at `version`."""
        return bool(self._due(version))

    def _due(self, version: int) -> dict[tuple[str, ViewId], _AskedWitness]:
        asked = self._requests.items()
        return {n: r for n, r in asked if r.is_known and r.untold(version)}

    async def tell(self, states: Mapping[int, LayerState], version: int) -> None:
        """At a step boundary: tell those that wait. Every layer is hashed once, however many ask,
        and how often."""
        due = self._due(version)
        wanted = {layer for request in due.values() for layer in request.untold(version)}
        held = {n: states[n] for n in sorted(wanted) if n in states}
        digests = {
            layer: await self._digest(state)
            for layer, state in held.items()
            if state.version == version
        }
        for key, request in due.items():
            of, sender = request.message, key[0]
            for layer in request.untold(version):
                if layer in digests:
                    request.told.add((layer, version))
                    said = StateDigest(of.view, of.number, layer, version, digests[layer])
                    self._messenger.tell(sender, said)
            request.versions.add(version)
        for key in [key for key, request in self._requests.items() if request.is_over(version)]:
            del self._requests[key]

    async def _digest(self, state: LayerState) -> bytes:
        digest = self._digests.get(state)
        if digest is None:
            version, digest = state.version, await self._compute.run(state.file_digest)
            self._digests.put(state, version, digest)
        return digest


class StateVotes:
    """The side of a peer that fetches: what holders say of the layers' states."""

    def __init__(self) -> None:
        self._asked: dict[str, ConfirmLayers] = {}
        """The latest request to each witness."""
        self._said: dict[int, dict[tuple[str, int], bytes]] = {}
        self._heard = asyncio.Event()

    def ask(
        self, witness: str, view: ViewId, number: int, layers: Collection[int]
    ) -> ConfirmLayers:
        """What to send to a witness; it replaces what it was asked before."""
        self._asked[witness] = ConfirmLayers(view, number, tuple(sorted(layers)))
        return self._asked[witness]

    def said(self, sender: str, message: StateDigest) -> None:
        """Note the word of a holder that was asked; one for an earlier request is ignored. Raises
        `PeerFault`."""
        asked = self._asked.get(sender)
        if asked is None or (asked.view, asked.number) != (message.view, message.number):
            return
        if message.layer not in asked.layers or len(message.digest) != DIGEST_BYTES:
            raise PeerFault(f"a digest of layer {message.layer}, which was not asked for", sender)
        said = self._said.setdefault(message.layer, {})
        said[sender, message.version] = message.digest
        own = [of for of in said if of[0] == sender]
        if len(own) > SAID_LIMIT:
            del said[own[0]]
        self._heard.set()

    async def count(
        self, witnesses: Collection[str], layer: int, version: int, donor: str, blob: str
    ) -> bool:
        """Whether what the donor gives counts. Waits until those that were asked have spoken, or
        the time for it is over."""
        awaited = set(witnesses) & set(self._asked)
        await self._until(lambda: awaited <= set(self._of(layer, version)))
        return self._judge(layer, version, donor, blob)

    async def is_odd(
        self, witnesses: Collection[str], layer: int, version: int, own: bytes
    ) -> bool:
        """Whether at least half of those that speak have another state than this peer. Waits until
        more than half of all have the same, or all have spoken, or the time for it is over."""
        asked = set(witnesses) & set(self._asked)

        def is_clear() -> bool:
            said = self._of(layer, version)
            return asked <= set(said) or 2 * list(said.values()).count(own) > len(asked)

        await self._until(is_clear)
        said = self._of(layer, version)
        return bool(said) and 2 * list(said.values()).count(own) <= len(said)

    async def word_of(self, peer_id: str, layer: int, version: int) -> bytes | None:
        """The digest of what a holder that was asked has; None if it has not said so in time."""
        await self._until(lambda: peer_id in self._of(layer, version))
        return self._of(layer, version).get(peer_id)

    def has_only(self, donor: str, layer: int, version: int) -> bool:
        """Whether nobody but the donor has spoken of that version. Others may not have come to it
        yet, whatever the donor says."""
        return not self._of(layer, version).keys() - {donor}

    async def _until(self, is_clear: Callable[[], bool]) -> None:
        """Wait until it is clear by what is said, or the time for it is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S):
                while not is_clear():
                    self._heard.clear()
                    await self._heard.wait()

    def is_outvoted(
        self, witnesses: Collection[str], layer: int, version: int, donor: str, blob: str
    ) -> bool:
        """Whether what the donor gives cannot count any more, even if all that have not spoken yet
        say the same."""
        others = self._of(layer, version)
        others.pop(donor, None)
        awaited = set(witnesses) & set(self._asked) - {donor}
        own = bytes.fromhex(blob)[:DIGEST_BYTES]
        against = sum(digest != own for digest in others.values())
        return 2 * against >= 1 + len(awaited | set(others))

    def _of(self, layer: int, version: int) -> dict[str, bytes]:
        said = self._said.get(layer, {}).items()
        return {sender: digest for (sender, of), digest in said if of == version}

    def _judge(self, layer: int, version: int, donor: str, blob: str) -> bool:
        voices = self._of(layer, version) | {donor: bytes.fromhex(blob)[:DIGEST_BYTES]}
        most, count = Counter(voices.values()).most_common(1)[0]
        odd = sorted(peer for peer, digest in voices.items() if digest != most)
        if odd:
            text = "layer %d at version %d: the state of %s is another than that of the rest"
            log.warning(text, layer, version, ", ".join(odd))
        return voices[donor] == most and 2 * count > len(voices)
