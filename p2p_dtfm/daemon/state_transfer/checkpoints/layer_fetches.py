"""The files that a checkpoint lacks here, from members that have announced them: which file is
asked for next, and of whom.

Members begin with different layers, and with those that fewest have. So they can fetch layers from
one another: else the line of the peer that saved them would be the only one in use. Where that peer
dies, its layers have as many copies as time allowed for.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints.announced_files import AnnouncedFiles
from p2p_dtfm.daemon.state_transfer.checkpoints.disk_room import DiskRoom
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.ports import now
from p2p_dtfm.train.model.checkpoint import (
    CheckpointFailed,
    add_layer_file,
    is_begun,
    read_manifest,
    step_of,
)
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.work import parameters_digest

REST_S = 30.0
"""For so long a layer that did not come is not asked for again, while others come."""

log = logging.getLogger("p2p_dtfm.checkpoints")


class _LackedLayer(NamedTuple):
    layer: int
    offers: dict[str, tuple[str, int]]
    lineage: str
    claimed: bytes
    """What its holders have claimed of the parameters in the offered file; empty if unknown. A file
    may take long: by then they may have done that step again, and claimed others."""


class _Failed(NamedTuple):
    at_s: float
    error: UserError | BlobUnavailable


class LayerFetches:
    """`busy` is held while something is written to a checkpoint."""

    def __init__(
        self, blobs: BlobExchange, announced: AnnouncedFiles, room: DiskRoom, busy: asyncio.Lock
    ) -> None:
        self._blobs = blobs
        self._announced = announced
        self._room = room
        self._busy = busy
        self.me = ""
        """This peer's name, by which the layers are drawn that it begins with."""

    async def complete(
        self,
        directory: Path,
        told: Mapping[str, CheckpointFiles],
        withheld: Collection[int],
        came: Callable[[], Awaitable[None]],
    ) -> UserError | BlobUnavailable | None:
        """Fetch all that is offered of a checkpoint; `came` is told of each layer. Returns what
        went wrong with a layer that did not come, if any. `told` outlives newer steps: where they
        come fast, what was begun is still ended.

        A layer that nobody gives holds up no other: where fewest have it, it would be the first
        each time. It is tried again after something else came, and so this comes to an end. Raises
        `NoRoom`, and `UserError` and `OSError` where the disk is at fault.
        """
        failed: dict[int, _Failed] = {}
        self._announced.completed_step = step_of(directory)
        while (wanted := self._next(directory, told, withheld, failed)) is not None:
            try:
                await self._fetch(directory, wanted)
            except (CheckpointFailed, OSError) as error:
                if is_begun(directory):  # else it was removed meanwhile, whatever the disk takes
                    self._room.refused(error)
                raise
            except (UserError, BlobUnavailable) as error:
                failed[wanted.layer] = _Failed(now.monotonic_s(), error)
            else:
                rested_s = now.monotonic_s() - REST_S
                failed = {n: each for n, each in failed.items() if each.at_s > rested_s}
                self._room.took()
                await came()
        return next((each.error for each in failed.values()), None)

    def _next(
        self,
        directory: Path,
        told: Mapping[str, CheckpointFiles],
        withheld: Collection[int],
        failed: Collection[int],
    ) -> _LackedLayer | None:
        """Of the layers that are missing and offered, the one that fewest have. Raises `NoRoom`."""
        manifest = read_manifest(directory)
        every = range(layer_count(manifest.spec()))
        missing = [n for n in every if str(n) not in manifest.layers and n not in withheld]
        announced, step, lineage = self._announced, manifest.step, manifest.lineage
        wanted = (
            _LackedLayer(
                n, announced.offers_of(n, manifest, told), lineage, announced.parameters_of(step, n)
            )
            for n in missing
            if n not in failed
        )
        first = min((it for it in wanted if it.offers), key=self._rank, default=None)
        if first is not None:
            self._room.require(missing)
        return first

    def _rank(self, wanted: _LackedLayer) -> tuple[int, bytes]:
        return len(wanted.offers), _drawn(f"{self.me} {wanted.layer}")

    async def _fetch(self, directory: Path, wanted: _LackedLayer) -> None:
        """Fetch a layer, first as the file that most peers offer. Raises what went wrong with the
        last of the offers.

        Meanwhile others may save: a peer that has a file alone may take as long as it likes to give
        it.
        """
        layer, offers, lineage, _ = wanted
        ranked = Counter(offers.values()).most_common()
        for number, ((blob, size_bytes), _) in enumerate(ranked, 1):
            donors = [peer for peer, offer in offers.items() if offer == (blob, size_bytes)]
            donors.sort(key=lambda peer: _drawn(f"{self.me} {layer} {peer}"))  # else all ask one
            target = directory / f"fetched-{layer}.partial"
            try:
                await self._blobs.fetch(blob, donors, target, size_bytes)
                await self._require_claimed(directory, wanted, blob, target)
                async with self._busy:
                    if read_manifest(directory).lineage == lineage:  # or it was begun anew
                        await asyncio.to_thread(add_layer_file, directory, layer, target)
                return
            except (UserError, BlobUnavailable) as error:
                if number == len(ranked) or isinstance(error, CheckpointFailed):
                    raise
                log.debug("layer %d of a checkpoint, from %s: %s", layer, donors, error)
            finally:
                target.unlink(missing_ok=True)

    async def _require_claimed(
        self, directory: Path, wanted: _LackedLayer, blob: str, file: Path
    ) -> None:
        """Raises `UserError` for a state whose holders computed with other parameters. They alone
        sign its digest: else they could save something that nobody has evaluated or audited."""
        if not wanted.claimed:
            return
        manifest, layer = read_manifest(directory), wanted.layer
        got = await asyncio.to_thread(_parameters_in, manifest.spec(), layer, file)
        if got != wanted.claimed:
            self._announced.refuse(manifest.step, layer, blob)
            raise UserError(
                f"layer {layer} of step {manifest.step} as its holders give it is not what they "
                "have computed with",
                "the checkpoint before stays",
            )


def _parameters_in(spec: RunSpec, layer: int, file: Path) -> bytes:
    return parameters_digest(LayerState.mapped(spec, layer, file).parameters)


def _drawn(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
