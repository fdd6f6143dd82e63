"""A layer before the first step: computed from the run's seed, or given weights fetched by hash.

Where a run trains adapters, the given weights are frozen and belong to a layer for good. A peer
that has the layer's state keeps their file; one that computes with it has them in memory.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.net.shared_work import SharedWork
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.train.data import BlobStore
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.initial_state import (
    INITIAL_LIMIT_BYTES,
    InitialFile,
    InitialState,
    attach_base,
    initial_layer_state,
    initial_paths,
    parse_initial,
)
from p2p_dtfm.train.model.layer_state import LayerState

INITIAL_NAME = "initial"
RETRY_S = 1.0
LONGEST_REST_S = 300.0
"""The longest rest between requests for what nothing waits for."""

log = logging.getLogger("p2p_dtfm")


def store_initial(spec: RunSpec, run_spec_path: Path, store: BlobStore) -> None:
    """The founder's part: take the weights beside the run spec into the store.

    Raises `UserError` if they are missing or not those that the run spec names.
    """
    if spec.model.initial:
        for path in initial_paths(run_spec_path.parent / INITIAL_NAME, spec):
            store.put_file(path)


class InitialStates:
    """`peers()` are those that may have what is not in `store`."""

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
        self._files = SharedWork[Path]()
        self.close = self._files.close
        self._of_ends: frozenset[str] | None = None
        self._kept: dict[int, Path] = {}
        """Where what is frozen of each layer was, when it was last read."""
        self.withheld: frozenset[int] = frozenset()
        """Layers that the run does not leave to this peer."""

    async def state(self, layer: int, tells: bool = True) -> LayerState:
        """The layer at version 0. Asks again until a peer has it. With `tells` the status says that
        this peer waits for it. Raises `UserError`."""
        if not self._spec.model.initial:
            return await self._compute.run(LayerState.genesis, self._spec, layer)
        path = await self._path(layer, tells)
        try:
            return await self._compute.run(initial_layer_state, self._spec, layer, path)
        except PeerFault as fault:
            raise _unusable(fault) from fault

    async def keep(self, layer: int) -> None:
        """Bring to this disk what is frozen of a layer, if anything is: a peer that has a layer's
        state has that as well. Asks again until a peer has it. What was once kept is not read
        again while it is there: each view asks, and steps wait for guardians. Raises
        `UserError`."""
        if self._spec.trains_adapters and not os.path.isfile(self._kept.get(layer, "")):
            self._kept[layer] = await self._path(layer, tells=False)

    async def complete(self, state: LayerState) -> None:
        """Add to a state that is to be computed with what is frozen of its layer. Asks and raises
        like `keep`."""
        if state.has_base:
            return
        path = await self._path(state.layer)
        try:
            await self._compute.run(attach_base, state, path)
        except PeerFault as fault:
            raise _unusable(fault) from fault

    async def keep_beside(self, is_member: Callable[[], bool]) -> None:
        """Bring what training itself may never need, beside it. Members refuse weights to peers
        that are no members yet."""
        while not is_member():
            await asyncio.sleep(RETRY_S)
        if self._spec.trains_adapters:
            await self._keep_all()
        await self._keep_origin()

    async def _keep_all(self) -> None:
        """Bring all of a frozen model: a peer that ends with adapters wants to use them. One file
        comes after another; one that nobody gives holds up no other."""
        missing = sorted(set(range(layer_count(self._spec))) - self.withheld)
        while missing:
            missing = [layer for layer in missing if not await self._is_kept(layer)]

    async def _is_kept(self, layer: int) -> bool:
        """Whether a layer's file is here after one try. Rests where that fails."""
        try:
            await self._fetched(layer)
            self._status.troubles.over("initial")
            return True
        except BlobUnavailable as error:
            log.debug("initial weights of layer %d: %s", layer, error)
        except OSError as error:
            self._tell_full(error)
        except PeerFault as fault:
            raise _unusable(fault) from fault
        await asyncio.sleep(RETRY_S)
        return False

    def _tell_full(self, error: OSError) -> str:
        what = f"initial weights cannot be written: {error.strerror or error}"
        self._status.troubles.tell("initial", what, "free space on that disk, or make it writable")
        return what

    async def _keep_origin(self) -> None:
        """Bring the small files of the model that the run began from: whoever exports wants them,
        also a peer that came late and never needed initial.json. Perhaps nobody has them any
        more."""
        rest_s = RETRY_S
        while True:
            try:
                origin = (await self._named()).origin
                if isinstance(origin, InitialFile):
                    await self._file(origin.digest, origin.bytes)
                return
            except (BlobUnavailable, OSError) as error:
                log.debug("the model's own files: %s", error)
                await asyncio.sleep(rest_s)
                rest_s = min(2 * rest_s, LONGEST_REST_S)
            except PeerFault as fault:
                return log.warning("the model's own files do not come along: %s", fault.cause)

    def is_of_ends(self, digest: str) -> bool:
        """Whether this is a file of given weights of the first layer, or of the last one."""
        path = self._store.path(self._spec.model.initial) if self._spec.model.initial else None
        if self._of_ends is None and path is not None:
            layers = parse_initial(path.read_bytes(), self._spec).layers
            self._of_ends = frozenset({layers[0].digest, layers[len(layers) - 1].digest})
        return digest in (self._of_ends or ())

    async def _path(self, layer: int, tells: bool = True) -> Path:
        """Where a layer's given weights are, once they are here."""
        try:
            while True:
                try:
                    return await self._fetched(layer)
                except BlobUnavailable as error:
                    what = f"initial weights of layer {layer}: {error}"
                except OSError as error:
                    what = self._tell_full(error)
                if tells:
                    self._status.say(State.WAITING, what)
                await asyncio.sleep(RETRY_S)
        except PeerFault as fault:
            raise _unusable(fault) from fault
        finally:
            self._status.troubles.over("initial")

    async def _fetched(self, layer: int) -> Path:
        file = (await self._named()).layers[layer]
        return await self._file(file.digest, file.bytes)

    async def _named(self) -> InitialState:
        path = await self._file(self._spec.model.initial, INITIAL_LIMIT_BYTES)
        return parse_initial(await asyncio.to_thread(path.read_bytes), self._spec)

    async def _file(self, digest: str, max_bytes: int) -> Path:
        return await self._files.result(digest, lambda: self._bring(digest, max_bytes))

    async def _bring(self, digest: str, max_bytes: int) -> Path:
        if await asyncio.to_thread(self._store.verify, digest):
            return self._store.held(digest)
        target = self._store.root / digest
        return await self._blobs.fetch(digest, self._peers(), target, max_bytes)


def _unusable(fault: PeerFault) -> UserError:
    return UserError(
        f"the run starts from weights that cannot be used: {fault.cause}",
        "ask the founder to import the model anew, as a new run",
        exit_code=5,
    )
