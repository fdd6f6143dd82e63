"""Whether a layer's state that a donor gives is the one that the other holders have.

Whoever asks one holder for a layer asks the others for digests of theirs, in the steps in which the
donor may give it. What a donor gives counts if more than half of those that speak of that version,
the donor among them, say the same; where nobody else has the layer its word has to do.
"""

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from p2p_dtfm.core.judgement import DIGEST_BYTES
from p2p_dtfm.core.snapshot import ViewId
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.daemon.courier import Courier
from p2p_dtfm.daemon.wire import ConfirmLayers, StateDigest
from p2p_dtfm.train.layer_state import LayerState

VERSIONS_TOLD = 3
"""Of so many steps, one after the other: a donor begins its own a moment earlier or later."""
REQUESTS_LIMIT = 64
WITNESSES_LIMIT = 4
"""So many others are asked; more would only cost them time."""
SAID_LIMIT = 16
"""Digests of one layer that are remembered."""

log = logging.getLogger("p2p_dtfm.witnesses")


@dataclass
class _Request:
    message: ConfirmLayers
    versions: set[int] = field(default_factory=set)
    """That were told."""


class WitnessDesk:
    """The side of a holder: at step boundaries it tells those who ask what it has."""

    def __init__(self, courier: Courier, compute: Compute) -> None:
        self._courier = courier
        self._compute = compute
        self._requests: dict[str, _Request] = {}

    def asked(self, sender: str, message: ConfirmLayers) -> None:
        """A new request replaces the sender's old one; of too many the oldest goes."""
        self._requests.pop(sender, None)
        while len(self._requests) >= REQUESTS_LIMIT:
            del self._requests[next(iter(self._requests))]
        self._requests[sender] = _Request(message)

    def is_due(self, version: int) -> bool:
        """Whether somebody waits for what is here at `version`."""
        return any(version not in request.versions for request in self._requests.values())

    async def tell(self, states: Mapping[int, LayerState], version: int) -> None:
        """At a step boundary. Every layer is hashed once, however many ask."""
        due = {n: r for n, r in self._requests.items() if version not in r.versions}
        wanted = {layer for request in due.values() for layer in request.message.layers}
        held = {n: states[n] for n in sorted(wanted) if n in states}
        digests = {
            layer: await self._compute.run(state.file_digest)
            for layer, state in held.items()
            if state.version == version
        }
        for sender, request in due.items():
            request.versions.add(version)
            if len(request.versions) >= VERSIONS_TOLD and self._requests.get(sender) is request:
                del self._requests[sender]
            of = request.message
            for layer in of.layers:
                if layer in digests:
                    said = StateDigest(of.view, of.number, layer, version, digests[layer])
                    self._courier.tell(sender, said)


class StateVotes:
    """The side of who fetches: what holders say of the layers' states."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """Of the latest request to each witness."""
        self._said: dict[int, dict[tuple[str, int], bytes]] = {}

    def request(self, view: ViewId, number: int, layers: Collection[int]) -> ConfirmLayers:
        return ConfirmLayers(view, number, tuple(sorted(layers)))

    def said(self, sender: str, message: StateDigest) -> None:
        """Only from one that was asked; anything else is of an earlier request."""
        if self.numbers.get(sender) != message.number or len(message.digest) != DIGEST_BYTES:
            return
        said = self._said.setdefault(message.layer, {})
        said[sender, message.version] = message.digest
        while len(said) > SAID_LIMIT:
            del said[next(iter(said))]

    def heard(self, layer: int, version: int) -> set[str]:
        """Who has spoken of a version."""
        return {sender for sender, of in self._said.get(layer, {}) if of == version}

    def judge(self, layer: int, version: int, donor: str, blob: str) -> tuple[bool, str]:
        """Whether what the donor gives counts; and if somebody differs, who, in words."""
        voices = {donor: bytes.fromhex(blob)[:DIGEST_BYTES]}
        for (sender, of), digest in self._said.get(layer, {}).items():
            if of == version and sender != donor:
                voices[sender] = digest
        most, count = Counter(voices.values()).most_common(1)[0]
        odd = sorted(peer for peer, digest in voices.items() if digest != most)
        text = f"{', '.join(odd)} has another state of layer {layer} than most" if odd else ""
        return voices[donor] == most and 2 * count > len(voices), text
