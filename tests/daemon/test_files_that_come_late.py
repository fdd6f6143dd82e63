"""Files of checkpoints that are asked for again: of the last one, of which nobody says more, and of
one whose step is taken a second time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints import checkpoints as checkpoint_files
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.model.checkpoint import list_checkpoints
from tests.daemon.test_saved_states import (
    LINEAGE,
    NO_BLOBS,
    SPEC,
    _FromAnother,
    _states,
    until_whole,
)

EVERY = set(range(workload_of(SPEC).layer_count))


class _BusyAtFirst(_FromAnother):
    def __init__(self, *theirs: Path) -> None:
        super().__init__(*theirs)
        self.asked = 0

    async def fetch(self, digest: str, peers: list[str], target: Path, max_bytes: int) -> Path:
        self.asked += 1
        if self.asked <= 2:
            raise BlobUnavailable(digest, {"other": "it is busy"})
        return await super().fetch(digest, peers, target, max_bytes)


def test_a_file_that_did_not_come_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A member whose line was cut as the run ended had no model, for good."""
    monkeypatch.setattr(checkpoint_files, "RETRY_S", 0.05)
    compute, step, told = Compute(), SPEC.total_steps, list[CheckpointFiles]()

    async def scenario() -> None:
        theirs, mine = tmp_path / "theirs", tmp_path / "mine"
        other = Checkpoints(theirs, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        await other.save(step, _states(step, EVERY), LINEAGE)
        busy: Any = _BusyAtFirst(theirs)
        checkpoints = Checkpoints(mine, SPEC, busy, compute, lambda files: None, lambda: True)
        checkpoints.committed(step, {}, LINEAGE)
        await checkpoints.save(step, _states(step, {0}), LINEAGE)
        checkpoints.remote_files("other", told[0])
        await until_whole(checkpoints, step)
        async with asyncio.timeout(10):
            while checkpoints._completing is None or not checkpoints._completing.done():
                await asyncio.sleep(0.01)
        await checkpoints.close()
        await other.close()

    asyncio.run(scenario())
    compute.close()
    said = [line for line in caplog.messages if "stays incomplete" in line]
    assert len(said) == 1, "it is told once, however often it is tried"


@pytest.mark.parametrize(("remembers", "whole"), [("the same", 5), ("another", None), (None, None)])
def test_who_goes_back_counts_on_what_is_whole_on_its_way(
    tmp_path: Path, remembers: str | None, whole: int | None
) -> None:
    """The member went back between two checkpoints, when none was whole. Old checkpoints kept the
    room of the next, and a leaver was told that all steps since step 0 are lost."""
    compute = Compute()

    async def scenario() -> None:
        checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda it: None, lambda: True)
        await checkpoints.save(5, _states(5, EVERY), "the same")
        await checkpoints.save(10, _states(10, EVERY), "lost")
        checkpoints.goes_on_from(7, {7: "here", 5: remembers, 10: "lost"}.get)
        assert checkpoints.whole_step == checkpoints.safe_step(()) == whole
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_a_step_that_is_taken_again_is_completed_again(tmp_path: Path) -> None:
    """The checkpoint was whole in a lineage that all have lost. Told of a few layers of the next
    lineage, nobody asked for the others until training was beyond it (seed 500847)."""
    compute, step, told = Compute(), 10, list[CheckpointFiles]()

    async def scenario() -> None:
        theirs, mine = tmp_path / "theirs", tmp_path / "mine"
        other = Checkpoints(theirs, SPEC, NO_BLOBS, compute, told.append, lambda: True)
        await other.save(step, _states(step, EVERY), LINEAGE)
        blobs: Any = _FromAnother(theirs)
        checkpoints = Checkpoints(mine, SPEC, blobs, compute, lambda files: None, lambda: True)
        await checkpoints.save(5, _states(5, EVERY), "lost")
        await checkpoints.save(step, _states(step, EVERY), "lost")
        checkpoints.goes_on_from(step, {step: "lost"}.get)
        assert checkpoints.whole_step == step
        checkpoints.goes_on_from(5, {5: "lost"}.get)
        assert checkpoints.whole_step == 5
        checkpoints.goes_on_from(0, {0: ""}.get)
        assert checkpoints.whole_step is None
        await checkpoints._files_changed(step)
        assert checkpoints.whole_step is None, "what still comes of it is lost as well"
        checkpoints.committed(step, {}, LINEAGE)
        await checkpoints.save(step, _states(step, {0}), LINEAGE)
        assert checkpoints.whole_step is None, "one layer of it is here"
        checkpoints.remote_files("other", told[0])
        await until_whole(checkpoints, step)
        await checkpoints.close()
        await other.close()

    asyncio.run(scenario())
    compute.close()
    assert {*list_checkpoints(tmp_path / "mine")[0].layers} == EVERY
