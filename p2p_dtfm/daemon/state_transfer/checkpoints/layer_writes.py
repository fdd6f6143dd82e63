"""The states of layers, written to a checkpoint one after the other, and to its end."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.state_transfer.checkpoints.files_here import FilesHere
from p2p_dtfm.train.model.checkpoint import OpenCheckpoint
from p2p_dtfm.train.model.layer_state import LayerState

Result = TypeVar("Result")

log = logging.getLogger("p2p_dtfm.checkpoints")


class LayerWrites:
    """The writes of one run. `busy` is held while something is written to a checkpoint. `here` is
    what others are told of, and given."""

    def __init__(
        self, spec: RunSpec, compute: Compute, busy: asyncio.Lock, here: FilesHere
    ) -> None:
        self._spec = spec
        self._compute = compute
        self._busy = busy
        self._here = here
        self._under_way: asyncio.Task[Any] | None = None

    async def unbroken(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Do this work while nobody else writes. It goes on to its end even if its caller is
        cancelled, as with a view. Else its thread would go on beside the next writer, and leave
        files that no manifest names. Raises what the work does.

        Work that has not begun by then does not begin: what it would write may be taken back.
        """
        await self._busy.acquire()
        task = self._under_way = asyncio.create_task(work(), name="writes a checkpoint")
        task.add_done_callback(lambda ended: self._busy.release())  # however early it is cancelled
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(report_bug)  # nobody else hears of it
            raise

    async def close(self) -> None:
        """Wait until what is under way has ended."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])

    async def write(
        self, root: Path, step: int, states: Iterable[LayerState], lineage: str
    ) -> set[int]:
        """Returns which layers are written. Raises `CheckpointFailed`.

        A checkpoint of the same step that was given up makes room. Its files are given to nobody
        any more before the first is replaced: whoever still fetched one would get bytes of both.
        """
        tokens = step * self._spec.tokens_per_step
        opened = OpenCheckpoint(root, self._spec, step, tokens, lineage)
        await asyncio.to_thread(opened.begin)
        self._here.changed()
        self._here.look()
        for state in states:
            await self._add(opened, state, step)
        await asyncio.to_thread(opened.end)
        return opened.written

    async def _add(self, opened: OpenCheckpoint, state: LayerState, step: int) -> None:
        """Add one layer. Only one copy is made at a time: there may be no room for that of a whole
        stage. It is made where states are changed, since not every save has training wait. A layer
        that has gone on meanwhile is left out."""

        def copied() -> memoryview | None:
            return state.to_bytes() if state.version == step else None

        if (payload := await self._compute.run(copied)) is not None:
            await asyncio.to_thread(opened.add, state.layer, payload)


def report_bug(task: asyncio.Task[Any]) -> None:
    """Training goes on without a whole checkpoint, but the bug is logged."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("bug while keeping checkpoints", exc_info=error)
