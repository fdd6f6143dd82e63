"""A stage's parameters of the open step, for members that judge a work of it and do not hold its
layers: all of its holders have claimed digests of them, so whoever gives the bytes gives the right
ones (`core.audit.judging`)."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from p2p_dtfm.core.audit.judging import states_parameters
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.facts.in_words import bytes_text
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.measure import free_bytes
from p2p_dtfm.train.stage.replay.work import LentLayer, bytes_of, chunk_digest, parameter_count

Tensor = Any
FetchFrom = Callable[[Sequence[str], str, int], Awaitable[bytes]]
"""`fetch(peer_ids, blob, size_bytes)`, from whichever of them has it."""
ROOM_FACTOR = 3
"""As much as a stage's parameters, a replay takes: these, their gradients, and parts to add up."""

log = logging.getLogger("p2p_dtfm")


class BegunWith:
    """Digests of a stage's parameters, and these as long as no step has changed them."""

    def __init__(self, states: Mapping[int, LayerState]) -> None:
        """Reads all of them: beside the event loop."""
        self._states = dict(states)
        self._versions = {layer: state.version for layer, state in states.items()}
        self.digests = {
            layer: chunk_digest(_on_host(state).numpy()) for layer, state in states.items()
        }

    def layer_of(self, digest: str) -> int | None:
        return next((n for n, it in self.digests.items() if it.hex() == digest), None)

    def find(self, digest: str) -> bytes | None:
        layer = self.layer_of(digest)
        if layer is None or self._states[layer].version != self._versions[layer]:
            return None
        return bytes_of(_on_host(self._states[layer]))


def began_with(plan: Plan, states: Mapping[int, LayerState]) -> BegunWith | None:
    """None where all hold the same layers, and nobody needs to be given any."""
    return BegunWith(states) if states_parameters(plan) else None


def _on_host(state: LayerState) -> Tensor:
    return state.parameters.detach().cpu()


class Borrowing:
    """Of one step, at one judge."""

    def __init__(
        self, me: str, spec: RunSpec, plan: Plan, states: Mapping[int, LayerState], fetch: FetchFrom
    ) -> None:
        """`states`: of the judge's own layers, which it need not borrow."""
        self._me = me
        self._spec = spec
        self._plan = plan
        self._states = states
        self._fetch = fetch

    def lacks(self, peer_id: str) -> list[int]:
        """Which of another's layers are not here."""
        return [layer for layer in self._plan.layers_of(peer_id) if layer not in self._states]

    async def borrowed(
        self, peer_id: str, digests: Mapping[int, bytes]
    ) -> dict[int, LentLayer] | None:
        """Those layers. None where there is no room for them, or nobody gives them: no fault of
        whose work it is."""
        layers = self.lacks(peer_id)
        counts = {layer: parameter_count(self._spec, layer) for layer in layers}
        device = next(iter(self._states.values())).device
        needed_bytes = ROOM_FACTOR * FLOAT_BYTES * sum(counts.values())
        if needed_bytes > free_bytes(device):
            log.warning("an audit needs %s that are not free here", bytes_text(needed_bytes))
            return None
        found = {}
        for layer in layers:
            name = digests[layer].hex()
            try:
                payload = await self._fetch(self._holders(layer), name, FLOAT_BYTES * counts[layer])
            except BlobUnavailable as error:
                log.warning("nobody gives layer %d for an audit: %s", layer, error)
                return None
            if len(payload) != FLOAT_BYTES * counts[layer]:
                log.warning("what all claim as layer %d is none", layer)
                return None
            found[layer] = LentLayer(layer, payload, device)
        return found

    def _holders(self, layer: int) -> list[str]:
        """In an order of this judge's own: not all ask one of them."""
        holders = self._plan.holders(layer)
        return sorted(holders, key=lambda it: digest_bytes(encode([self._me, layer, it])))
