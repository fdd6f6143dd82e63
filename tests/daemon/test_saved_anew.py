"""A checkpoint whose files are replaced, or removed, while others fetch them or they come here."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.daemon.telemetry.status import Troubles
from p2p_dtfm.train.data.blob_store import file_digest
from p2p_dtfm.train.model.checkpoint import (
    OpenCheckpoint,
    checkpoint_directory,
    list_checkpoints,
    remove_checkpoint,
)
from p2p_dtfm.train.model.gpt import layer_count
from tests.daemon.test_saved_states import LINEAGE, SPEC, _Slow, _states
from tests.daemon.trainer_parts import NO_BLOBS

STEP, OTHER = 4, "c3" * 32


def test_a_file_that_is_replaced_is_given_to_nobody_under_its_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure the same step was saved again. Whoever still fetched a file of the first time
    got bytes of both, and told its user that the giver sends wrong ones."""
    compute, add = Compute(), OpenCheckpoint.add
    given: list[bool] = []
    told: list[str] = []

    async def scenario() -> None:
        checkpoints = Checkpoints(
            tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True
        )
        await checkpoints.save(STEP, _states(STEP, {0, 1}), LINEAGE)
        (before,) = list_checkpoints(tmp_path)
        names = [file.digest for file in before.manifest.layers.values()]
        assert all(map(checkpoints.path_of, names))

        def added(opened: OpenCheckpoint, layer: int, payload: memoryview) -> None:
            add(opened, layer, payload)
            paths = {name: checkpoints.path_of(name) for name in names}
            given.extend(file_digest(path) == name for name, path in paths.items() if path)
            told.extend(it.lineage for it in checkpoints.saved)

        monkeypatch.setattr(OpenCheckpoint, "add", added)
        again = _states(STEP, {0, 1})
        for state in again.values():
            state.parameters.add_(1.0)
        await checkpoints.save(STEP, again, OTHER)
        assert all(given), "these bytes are no longer those that they are called by"
        assert not told, "nor does anybody hear that they are here"
        (after,) = list_checkpoints(tmp_path)
        assert all(checkpoints.path_of(it.digest) for it in after.manifest.layers.values())
        assert not any(map(checkpoints.path_of, names))
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_a_checkpoint_that_is_removed_while_it_comes_says_nothing_of_the_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The user was told that the disk does not take the model, and all older ones but one went to
    make room for it."""
    compute, troubles = Compute(), Troubles()
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    every = set(range(layer_count(SPEC)))

    async def scenario() -> None:
        told: list[CheckpointFiles] = []
        other = Checkpoints(theirs, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        await other.save(STEP, _states(STEP, every), LINEAGE)
        slow = _Slow(theirs)
        blobs: Any = slow
        member = Checkpoints(mine, SPEC, blobs, compute, lambda files: None, lambda: True, troubles)
        for step in (2, 3):
            await member.save(step, _states(step, every), LINEAGE)
        member.committed(STEP, {}, LINEAGE)
        await member.save(STEP, _states(STEP, {0}), LINEAGE)
        member.remote_files("other", told[-1])
        async with asyncio.timeout(20):
            await slow.asked.wait()
            remove_checkpoint(checkpoint_directory(mine, STEP))
            slow.gives.set()
            while not any("stays incomplete" in line for line in caplog.messages):
                await asyncio.sleep(0.01)
        assert not troubles.present()
        assert not any("does not take" in line for line in caplog.messages)
        assert [it.manifest.step for it in list_checkpoints(mine)] == [3, 2]
        await member.close()
        await other.close()

    asyncio.run(scenario())
    compute.close()
