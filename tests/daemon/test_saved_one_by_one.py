"""A stage is saved one layer after the other, whether or not training goes on meanwhile."""

import asyncio
import contextvars
import errno
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.machine.disk import SET_ASIDE
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.telemetry.status import Troubles
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
"""Time for a writer to let go of a layer after it has said that the layer is written."""


def test_a_stage_is_saved_one_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of the whole stage took as much memory again, at each checkpoint."""
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
    """A peer that leaves saves beside training: a restart may take the last step back, or one more
    step may come."""
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


class _Stopped(disk.MachineDisk):
    """A disk that takes nothing until it may. `most`: the largest number of files under way at
    once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.may_go_on, self.most = threading.Event(), threading.Event(), 0
        self.error, self._now, self._counts = error, 0, threading.Lock()

    def write_whole(self, path: Path, payload: disk.Payload, mode: int) -> None:
        with self._counts:
            self._now += 1
            self.most = max(self.most, self._now)
        self.begun.set()
        assert self.may_go_on.wait(30)
        if self.error is not None:
            raise self.error
        super().write_whole(path, payload, mode)
        with self._counts:
            self._now -= 1


def _whoever_saves_is_cancelled(
    root: Path,
    stopped: _Stopped,
    then: Callable[[Checkpoints], Awaitable[None]],
    troubles: Troubles,
) -> None:
    compute, step = Compute(), 5

    async def scenario() -> None:
        disk.live_by(stopped)
        given = (root, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
        checkpoints = Checkpoints(*given, troubles)
        saving = asyncio.create_task(checkpoints.save(step, _stage(step), LINEAGE))
        assert await asyncio.to_thread(stopped.begun.wait, 30)
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)
        assert saving.cancelled()
        await then(checkpoints)
        stopped.may_go_on.set()
        await checkpoints.close()
        assert [it.version for it in checkpoints.saved] == ([] if stopped.error else [step])

    contextvars.copy_context().run(asyncio.run, scenario())
    compute.close()


def _stage(step: int) -> dict[int, LayerState]:
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}
    for state in states.values():
        state.version = step
    return states


def test_where_whoever_saves_is_cancelled_the_checkpoint_is_written_to_its_end(
    tmp_path: Path,
) -> None:
    """The files of layers were there, without the manifest that names them."""

    async def nothing(checkpoints: Checkpoints) -> None:
        pass

    _whoever_saves_is_cancelled(tmp_path, _Stopped(), nothing, Troubles())
    ((directory, layers),) = [(it.directory, it.layers) for it in list_checkpoints(tmp_path)]
    assert complete(directory) and len(layers) == layer_count(SPEC)


def test_nobody_else_writes_while_a_cancelled_save_still_does(tmp_path: Path) -> None:
    """The thread went on, and another save wrote the same file at the same time."""
    stopped, later = _Stopped(), list[asyncio.Task[None]]()

    async def saves_again(checkpoints: Checkpoints) -> None:
        later.append(asyncio.create_task(checkpoints.save(5, _stage(5), LINEAGE)))
        later.append(asyncio.create_task(checkpoints.save(5, _stage(5), LINEAGE)))
        await asyncio.sleep(0.3)
        later[1].cancel()  # it has begun nothing, and begins nothing
        assert stopped.most == 1
        stopped.may_go_on.set()
        await later[0]

    _whoever_saves_is_cancelled(tmp_path, stopped, saves_again, Troubles())
    assert stopped.most == 1 and later[1].cancelled()
    (found,) = list_checkpoints(tmp_path)
    assert complete(found.directory)


@pytest.mark.parametrize("is_bug", [False, True])
def test_what_goes_wrong_with_a_cancelled_save_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_bug: bool
) -> None:
    """Nobody waits for that save any more."""
    full = OSError(errno.ENOSPC, "No space left on device")
    stopped, troubles = _Stopped(ValueError("ours") if is_bug else full), Troubles()

    async def nothing(checkpoints: Checkpoints) -> None:
        pass

    _whoever_saves_is_cancelled(tmp_path, stopped, nothing, troubles)
    gc.collect()
    assert "never retrieved" not in caplog.text and not list_checkpoints(tmp_path)
    assert caplog.text.count("bug while keeping checkpoints") == is_bug
    assert len(troubles.present()) == (not is_bug)
