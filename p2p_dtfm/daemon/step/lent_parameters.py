"""A stage's parameters of the open step, for members that judge its work and do not hold its
layers. All holders have claimed digests of them, so whoever gives the bytes gives the right ones
(`core.audit.judging`, decision 72)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from p2p_dtfm.core.audit.boundaries import beside, boundary_bytes
from p2p_dtfm.core.audit.judging import states_parameters
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.facts.in_words import bytes_text
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.ports import now
from p2p_dtfm.train.model.gpt import build_layer
from p2p_dtfm.train.model.layer_state import LayerState, parameter_count
from p2p_dtfm.train.stage.measure import free_bytes
from p2p_dtfm.train.stage.replay.work import LentLayer, parameters_digest

FetchFrom = Callable[[Sequence[str], str, int], Awaitable[bytes]]
"""`fetch(peer_ids, blob, size_bytes)`: the bytes, from whichever of these peers has them."""
BytesPerS = Callable[[str], int]
"""How fast a peer gives, over the line that it has and that of the judge."""
LENT_WITHIN_S = 3.0
"""How long a holder that alone has the layers of a work may take to lend them, beside the time that
the lines take. The others wait for `FLOOR_NS` beside it. A liar that lent slowly would have them
take each judge for the one that holds them up."""
ROOM_FACTOR = 3
"""The memory that a replay takes, in stages' parameters: the parameters, their gradients, and parts
to add up."""

log = logging.getLogger("p2p_dtfm")


class NoParameters(Exception):
    """All holders of a layer have claimed a digest of something that is not its parameters, or that
    none of them has."""

    def __init__(self, peer_ids: Sequence[str], layer: int) -> None:
        self.peer_ids = tuple(peer_ids)
        super().__init__(f"what {', '.join(peer_ids)} claim as layer {layer} is not to be had")


class BegunWith:
    """Digests of a stage's parameters, and the parameters themselves as long as no step has changed
    them."""

    def __init__(self, states: Mapping[int, LayerState]) -> None:
        """Reads all parameters, so call it beside the event loop. Copies those that are not in main
        memory."""
        self._states = dict(states)
        self._versions = {layer: state.version for layer, state in states.items()}
        self._on_host = {layer: it.parameters.detach().cpu() for layer, it in states.items()}
        self.digests = {layer: parameters_digest(it) for layer, it in self._on_host.items()}

    def find(self, digest: str) -> memoryview | None:
        """The parameters with this digest. They are no copy: others fetch them in pieces."""
        for layer, it in self.digests.items():
            if it.hex() == digest and self._states[layer].version == self._versions[layer]:
                return self._on_host[layer].numpy().data.cast("B")
        return None


def begun_with(plan: Plan, states: Mapping[int, LayerState]) -> BegunWith | None:
    """None where all members hold the same layers: then nobody needs to be lent any."""
    return BegunWith(states) if states_parameters(plan) else None


class Borrowing:
    """What one judge borrows in one step."""

    def __init__(
        self,
        me: str,
        spec: RunSpec,
        plan: Plan,
        states: Mapping[int, LayerState],
        fetch: FetchFrom,
        compute: Compute,
        bytes_per_s: BytesPerS,
    ) -> None:
        """`states`: those of the judge's own layers, which it need not borrow."""
        self._me = me
        self._spec = spec
        self._plan = plan
        self._states = states
        self._fetch = fetch
        self._compute = compute
        self._bytes_per_s = bytes_per_s
        self._left_s = LENT_WITHIN_S
        """How long those that alone have layers may still take, beside the time of the lines."""

    async def borrowed(
        self, peer_id: str, digests: Mapping[int, bytes]
    ) -> dict[int, LentLayer] | None:
        """The layers of another member's stage that are not here. None where there is no room for
        them: that is no fault of the member that is judged. Raises `NoParameters`, and
        `BlobUnavailable` where no holder gives them in time."""
        layers = [layer for layer in self._plan.layers_of(peer_id) if layer not in self._states]
        device = next(iter(self._states.values())).device
        counts = await self._compute.run_beside(
            lambda: {it: parameter_count(build_layer(self._spec, it, "meta")) for it in layers}
        )
        frames_bytes = 2 * boundary_bytes(self._spec) * len(beside(self._plan, peer_id))
        needed_bytes = ROOM_FACTOR * FLOAT_BYTES * sum(counts.values()) + frames_bytes
        if needed_bytes > free_bytes(device):
            log.info("an audit needs %s that are not free here", bytes_text(needed_bytes))
            return None
        found, self._left_s = {}, LENT_WITHIN_S
        for layer in layers:
            payload = await self._payload(layer, digests[layer], FLOAT_BYTES * counts[layer])
            found[layer] = await self._compute.run_beside(LentLayer, layer, payload, device)
        return found

    async def _payload(self, layer: int, digest: bytes, size_bytes: int) -> bytes:
        """Raises `BlobUnavailable` where nobody gives them in time, and not all holders deny that
        they have them: without a word liars that are always too busy would be audited by nobody."""
        holders = self._holders(layer)
        try:
            if len(holders) == 1:
                payload = await self._of_one(holders[0], digest.hex(), size_bytes)
            else:  # a slow one is left for the next one
                payload = await self._fetch(holders, digest.hex(), size_bytes)
        except BlobUnavailable as error:
            if set(holders) <= error.denied:  # the holders have claimed it in this step
                raise NoParameters(holders, layer) from error
            raise
        if len(payload) != size_bytes:
            raise NoParameters(holders, layer)
        return payload

    async def _of_one(self, holder: str, blob: str, size_bytes: int) -> bytes:
        """Raises `BlobUnavailable`."""
        began_s = now.monotonic_s()
        self._left_s += size_bytes / self._bytes_per_s(holder)
        try:
            async with asyncio.timeout(self._left_s):
                return await self._fetch([holder], blob, size_bytes)
        except TimeoutError as error:
            causes = {holder: "lends slower than its line carries"}
            raise BlobUnavailable(blob, causes) from error
        finally:
            self._left_s -= now.monotonic_s() - began_s

    def _holders(self, layer: int) -> list[str]:
        """In an order of this judge's own, so that not all judges ask the same holder first."""
        holders = self._plan.holders(layer)
        return sorted(holders, key=lambda it: digest_bytes(encode([self._me, layer, it])))
