"""A peer may have all layers of a model on its disk that its memory does not hold."""

import asyncio
import errno
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.state_transfer.checkpoints.checkpoints import Checkpoints
from p2p_dtfm.train.data import file_digest
from p2p_dtfm.train.model import checkpoint as checkpoints_module
from p2p_dtfm.train.model.checkpoint import (
    add_layer_file,
    complete,
    layer_path,
    load_layer,
    read_manifest,
    remove_checkpoint,
)
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.work import SharedLayer
from tests.core.builders import run_spec
from tests.daemon.trainer_parts import NO_BLOBS
from tests.train.saved_layers import save_layers

SPEC = run_spec()
LARGE = run_spec(
    model={"layers": 2, "width": 768, "heads": 8, "context": 32, "vocabulary": 256},
)


@pytest.fixture(autouse=True)
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints_module, "MAPPED_LEAST_BYTES", 0)
    monkeypatch.setattr(checkpoints_module, "READ_BYTES", 1000)


def trained(layer: int, spec=SPEC) -> LayerState:
    state = LayerState.genesis(spec, layer)
    for step in range(2):
        torch.manual_seed(step)
        state.apply(torch.randn(state.parameter_count), 1.0, 0.01)
    return state


def saved(directory: Path) -> Path:
    states = [trained(layer) for layer in range(layer_count(SPEC))]
    return save_layers(directory, SPEC, 2, 0, states)


def test_it_is_what_was_saved_and_goes_on_as_that_does(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    for layer in range(layer_count(SPEC)):
        state, same = load_layer(directory, layer), trained(layer)
        assert state._is_mapped
        assert state.version == 2 and state.shapes == same.shapes and state.has_base
        assert state.to_bytes() == same.to_bytes() and state.digest() == same.digest()
        assert state.file_digest() == same.file_digest()
        assert state._is_mapped, "all that needs none of it in memory"
        for one in (state, same):
            assert [tuple(it.shape) for it in one.module.parameters()] == [s for _, s in one.shapes]
            one.apply(torch.full((one.parameter_count,), 0.5), 1.0, 0.01)
            assert one.version == 3 and not one.gradient.any() and not one._is_mapped
        assert state.to_bytes() == same.to_bytes()
    assert complete(directory), "what is computed with it does not reach the file"


def test_who_computes_works_again_has_it_where_all_have_theirs(tmp_path: Path) -> None:
    """Kernels may add in another order from another place in memory."""
    state = load_layer(saved(tmp_path), 1)
    shared = SharedLayer(SPEC, state)
    assert not state._is_mapped
    assert shared.parameters.data_ptr() == state.parameters.data_ptr()
    assert (
        shared.parameters.data_ptr() % 64 == LayerState.genesis(SPEC, 1).parameters.data_ptr() % 64
    )


def test_its_file_may_go(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    state, moved = load_layer(directory, 1), load_layer(directory, 1)
    remove_checkpoint(directory)
    assert state.to_bytes() == trained(1).to_bytes()
    moved.move(None)
    moved.move(torch.device("cpu"))
    assert moved.gradient.shape == moved.parameters.shape
    assert moved.to_bytes() == state.to_bytes()


def test_a_damaged_or_a_shorter_one_is_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path)
    path = layer_path(directory, 1)
    whole = path.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-4], b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="is damaged"):
            load_layer(directory, 1)
        assert not complete(directory)


def test_a_layer_that_was_fetched_is_never_in_memory(tmp_path: Path) -> None:
    """It was read whole: a peer of small layers ran out of memory by the largest one of another."""
    parts = [LayerState.genesis(LARGE, layer) for layer in range(2)]
    directory = save_layers(tmp_path / "ours", LARGE, 0, 0, parts[:1])
    theirs = layer_path(save_layers(tmp_path / "theirs", LARGE, 0, 0, parts[1:]), 1)
    size_bytes = theirs.stat().st_size
    tracemalloc.start()
    try:
        add_layer_file(directory, 1, theirs)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert layer_path(directory, 1).read_bytes() == theirs.read_bytes()
    assert peak_bytes < size_bytes / 10


def test_a_layer_that_was_fetched_needs_no_disk_that_maps_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some that another machine shares map none, so no checkpoint became whole there. Where the
    disk of a mapped file fails, its process ends at once."""
    theirs = layer_path(saved(tmp_path / "theirs"), 1)
    ours = save_layers(tmp_path / "ours", SPEC, 2, 0, [trained(0)])

    def maps_none(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(numpy, "memmap", maps_none)
    add_layer_file(ours, 1, theirs)
    assert load_bytes(ours) == theirs.read_bytes()


def load_bytes(directory: Path) -> bytes:
    """A layer's file, if it is the one that the manifest names."""
    path = layer_path(directory, 1)
    named = read_manifest(directory).layers["1"]
    assert (file_digest(path), path.stat().st_size) == (named.digest, named.bytes)
    return path.read_bytes()


def test_of_an_empty_file_it_is_said_that_it_is_no_layer(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    with pytest.raises(UserError, match="is not the state of layer 1"):
        LayerState.mapped(SPEC, 1, path)
    with pytest.raises(UserError, match="is not the state of layer 1"):
        add_layer_file(saved(tmp_path), 1, path)


def test_a_founder_that_starts_again_has_no_model_in_memory(tmp_path: Path) -> None:
    """Twelve bytes of each parameter, and four more for gradients, were in memory before the first
    other member had come."""
    states = [LayerState.genesis(LARGE, layer) for layer in range(layer_count(LARGE))]
    model_bytes = sum(12 * state.parameter_count for state in states)
    assert model_bytes > 150_000_000
    save_layers(tmp_path, LARGE, 0, 0, states)
    del states
    compute = Compute()
    checkpoints = Checkpoints(tmp_path, LARGE, NO_BLOBS, compute, lambda files: None, lambda: True)

    async def run() -> None:
        before_bytes = own_bytes()
        found = await checkpoints.newest_whole()
        assert found is not None and set(found[1]) == set(range(layer_count(LARGE)))
        assert own_bytes() - before_bytes < model_bytes / 8
        held = bytearray(b"x" * model_bytes)
        assert own_bytes() - before_bytes > model_bytes / 2, f"it measures {len(held)} bytes"
        await checkpoints.close()

    asyncio.run(run())
    compute.close()


def own_bytes() -> int:
    """The bytes of this process's memory that belong to no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")
