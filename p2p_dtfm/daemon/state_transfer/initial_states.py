"""A layer before the first step: computed from the run's seed, or given weights fetched by hash."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.train.data import BlobStore
from p2p_dtfm.train.model.initial_state import (
    INITIAL_LIMIT_BYTES,
    initial_layer_state,
    initial_paths,
    parse_initial,
)
from p2p_dtfm.train.model.layer_state import LayerState

INITIAL_NAME = "initial"
RETRY_S = 1.0

log = logging.getLogger("p2p_dtfm")


def store_initial(spec: RunSpec, run_spec_path: Path, store: BlobStore) -> None:
    """The founder's part: take the weights beside the run spec into the store.

    Raises `UserError` if they are missing or not those that the run spec names.
    """
    if spec.model.initial:
        for path in initial_paths(run_spec_path.parent / INITIAL_NAME, spec):
            store.put_file(path)


class InitialStates:
    """`peers()` may have what is not in `store`."""

    def __init__(
        self,
        spec: RunSpec,
        store: BlobStore,
        blobs: BlobExchange,
        compute: Compute,
        status: Status,
        peers: Callable[[], list[str]],
    ) -> None:
        self._spec = spec
        self._store = store
        self._blobs = blobs
        self._compute = compute
        self._status = status
        self._peers = peers

    async def state(self, layer: int) -> LayerState:
        """The layer at version 0. Asks again until a peer has it. Raises `UserError`."""
        if not self._spec.model.initial:
            return await self._compute.run(LayerState.genesis, self._spec, layer)
        while True:
            try:
                return await self._given(layer)
            except BlobUnavailable as error:
                self._status.say(State.WAITING, f"initial weights of layer {layer}: {error}")
                await asyncio.sleep(RETRY_S)
            except PeerFault as fault:
                raise UserError(
                    f"the run starts from weights that cannot be used: {fault.cause}",
                    "ask the founder to import the model anew, as a new run",
                    exit_code=5,
                ) from fault

    async def _given(self, layer: int) -> LayerState:
        path = await self._file(self._spec.model.initial, INITIAL_LIMIT_BYTES)
        initial = parse_initial(await asyncio.to_thread(path.read_bytes), self._spec)
        file = initial.layers[layer]
        path = await self._file(file.digest, file.bytes)
        return await self._compute.run(initial_layer_state, self._spec, layer, path)

    async def _file(self, digest: str, max_bytes: int) -> Path:
        if await asyncio.to_thread(self._store.verify, digest):
            return self._store.held(digest)
        return await self._blobs.fetch(digest, self._peers(), self._store.root / digest, max_bytes)
