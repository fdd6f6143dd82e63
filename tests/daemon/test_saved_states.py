"""Others are told what is on disk now, not what was there when the daemon started."""

import asyncio
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.held_back import LIMIT as HELD_BACK
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints import SAVED_TOLD, Checkpoints
from p2p_dtfm.train.model.checkpoint import list_checkpoints, remove_checkpoint
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from tests.daemon.trainer_parts import NO_BLOBS, SPEC


def test_what_is_saved_and_removed_is_known_at_once(tmp_path: Path) -> None:
    compute = Compute()
    checkpoints = Checkpoints(tmp_path, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    every = set(range(layer_count(SPEC)))

    async def save(step: int, layers: set[int]) -> None:
        states = {layer: LayerState.genesis(SPEC, layer) for layer in layers}
        for state in states.values():
            state.version = step
        await checkpoints.save(step, states, f"lineage {step}")

    async def scenario() -> None:
        assert checkpoints.saved == ()
        await save(5, every)
        await save(10, {0})
        found = [(it.version, it.lineage, set(it.layers)) for it in checkpoints.saved]
        assert found == [(10, "lineage 10", {0}), (5, "lineage 5", every)]
        remove_checkpoint(list_checkpoints(tmp_path)[-1].directory)
        assert [it.version for it in checkpoints.saved] == [10]
        for step in range(15, 15 + 5 * SAVED_TOLD, 5):
            await save(step, {0})
        assert len(checkpoints.saved) == SAVED_TOLD
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_the_newest_whole_one_is_of_the_side_that_this_peer_is_on(tmp_path: Path) -> None:
    """After going over to others that have come less far, what it had saved counts no more."""
    compute, root = Compute(), tmp_path / "checkpoints"
    checkpoints = Checkpoints(root, SPEC, NO_BLOBS, compute, lambda files: None, lambda: True)
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(layer_count(SPEC))}

    async def save(step: int) -> None:
        for state in states.values():
            state.version = step
        await checkpoints.save(step, states, f"lineage {step}")

    async def scenario() -> None:
        checkpoints.resumed(5)
        assert checkpoints.whole_step == 5
        for step in range(10, 10 + 5 * SPEC.checkpoint.keep, 5):
            await save(step)
        latest = checkpoints.whole_step
        assert latest == step
        await checkpoints.set_aside(states, step, "given up")
        assert checkpoints.whole_step is None
        await save(5)
        assert checkpoints.whole_step == 5
        assert 5 in [it.version for it in checkpoints.saved]
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()


def test_who_computes_alone_is_believed_of_what_it_saves(tmp_path: Path) -> None:
    """The others hear of its steps some at a time, and of a checkpoint at once."""
    compute = Compute()
    spec = SPEC.model_copy(update={"total_steps": 10_000})
    checkpoints = Checkpoints(tmp_path, spec, NO_BLOBS, compute, lambda files: None, lambda: False)

    async def scenario() -> None:
        checkpoints.committed(100, {})
        files = {0: ("ab" * 32, 100)}
        checkpoints.remote_files("alone", CheckpointFiles(100 + 3 * HELD_BACK, "", files))
        with pytest.raises(PeerFault, match="far ahead"):
            checkpoints.remote_files("alone", CheckpointFiles(1000, "", files))
        await checkpoints.close()

    asyncio.run(scenario())
    compute.close()
