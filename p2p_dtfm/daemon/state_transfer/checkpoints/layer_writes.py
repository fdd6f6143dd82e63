"""The states of layers, written to a checkpoint one after the other."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.train.model.checkpoint import OpenCheckpoint
from p2p_dtfm.train.model.layer_state import LayerState


class LayerWrites:
    """Of one run."""

    def __init__(self, spec: RunSpec, compute: Compute) -> None:
        self._spec = spec
        self._compute = compute

    async def write(
        self, root: Path, step: int, states: Iterable[LayerState], lineage: str
    ) -> set[int]:
        """Which layers are written. Raises `CheckpointFailed`."""
        tokens = step * self._spec.tokens_per_step
        opened = OpenCheckpoint(root, self._spec, step, tokens, lineage)
        await asyncio.to_thread(opened.begin)
        for state in states:
            await self._add(opened, state, step)
        await asyncio.to_thread(opened.end)
        return opened.written

    async def _add(self, opened: OpenCheckpoint, state: LayerState, step: int) -> None:
        """One copy at a time: of a whole stage there may be no room for one. It is made where
        states are changed, since not everybody who saves has training wait: a layer that has gone
        on meanwhile is left out."""

        def copied() -> memoryview | None:
            return state.to_bytes() if state.version == step else None

        if (payload := await self._compute.run(copied)) is not None:
            await asyncio.to_thread(opened.add, state.layer, payload)
