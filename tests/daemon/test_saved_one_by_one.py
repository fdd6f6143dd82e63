"""A stage is saved one layer after the other, whoever trains on meanwhile."""

import asyncio
import contextvars
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import SET_ASIDE, Checkpoints
from p2p_dtfm.ports import disk
from p2p_dtfm.train.model.checkpoint import (
    checkpoint_directory,
    complete,
    list_checkpoints,
    load_layer,
)
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from tests.daemon.trainer_parts import NO_BLOBS, SPEC

LINEAGE = "5a" * 32
FORGOTTEN_WITHIN_S = 30.0
"""Whoever has written it says so, and then lets it go."""


def test_a_stage_is_saved_one_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the whole stage beside it was as much memory again, at each checkpoint."""
    compute, step = Compute(), 5
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}
    for state in states.values():
        state.version = step
    alive: list[weakref.ref[Any]] = []

    def alone(copies: Callable[[LayerState], Any]) -> Callable[[LayerState], Any]:
        def copied(state: LayerState) -> Any:
            end_s = time.monotonic() + FORGOTTEN_WITHIN_S
            while any(ref() is not None for ref in alive):
                assert time.monotonic() < end_s, "the one before is still there"
                time.sleep(0.001)
            copy = copies(state)
            alive.append(weakref.ref(copy))
            return copy

        return copied

    monkeypatch.setattr(LayerState, "snapshot", alone(LayerState.snapshot))
    monkeypatch.setattr(LayerState, "to_bytes", alone(LayerState.to_bytes))

    async def scenario() -> None:
        checkpoints = Checkpoints(
            tmp_path / "own", SPEC, NO_BLOBS, compute, lambda files: None, lambda: True
        )
        await checkpoints.save(step, states, LINEAGE)
        assert await checkpoints.set_aside(states, step, LINEAGE) is not None
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()
    assert len(alive) == 2 * len(states)
    for root in (tmp_path / "own", tmp_path / SET_ASIDE):
        ((directory, layers),) = [(it.directory, it.layers) for it in list_checkpoints(root)]
        assert complete(directory) and set(layers) == set(states)


def test_a_layer_that_goes_on_while_others_are_saved_is_left_out(tmp_path: Path) -> None:
    """Who leaves saves beside training: a restart may take the last step back, or one more come."""
    compute, step = Compute(), 5
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(3)}
    for state in states.values():
        state.version = step

    class GoesOn(disk.MachineDisk):
        def write_whole(self, path: Path, payload: disk.Payload, mode: int) -> None:
            super().write_whole(path, payload, mode)
            states[2].version = step + 1

    async def scenario() -> None:
        disk.live_by(GoesOn())
        checkpoints = Checkpoints(
            tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True
        )
        await checkpoints.save(step, states, LINEAGE)
        await checkpoints.close()

    contextvars.copy_context().run(asyncio.run, scenario())
    compute.close()
    assert [it.layers for it in list_checkpoints(tmp_path)] == [(0, 1)]
    assert load_layer(checkpoint_directory(tmp_path, step), 1).version == step
