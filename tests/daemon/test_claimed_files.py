"""Files of a checkpoint that come late: what their holders claimed of them holds until then, and
of no other file."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.recovery.contradictions import AgreedState
from p2p_dtfm.daemon.peers.wire import CheckpointFiles
from p2p_dtfm.daemon.state_transfer.checkpoints.announced_files import (
    STEPS_REMEMBERED,
    AnnouncedFiles,
)
from p2p_dtfm.daemon.state_transfer.checkpoints.layer_fetches import LayerFetches
from p2p_dtfm.train.data import file_digest
from p2p_dtfm.train.model.checkpoint import OpenCheckpoint, read_manifest
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.work import parameters_digest
from tests.models.conftest import make_spec

SPEC = make_spec()
STEP, LAYER, LINEAGE, OTHER = 4, 1, "ab" * 32, "cd" * 32


class File:
    """What a holder has saved of a layer, and what it has claimed of that."""

    def __init__(
        self, folder: Path, name: str, value: float, is_true: bool = True, layer: int = LAYER
    ) -> None:
        state = LayerState.genesis(SPEC, layer)
        state.version = STEP
        claimed = parameters_digest(state.parameters.add_(value))
        if not is_true:
            state.parameters.neg_()
        self.path = folder / name
        self.path.write_bytes(state.to_bytes())
        self.blob = file_digest(self.path)
        self.agreed = {layer: AgreedState(bytes.fromhex(self.blob)[:DIGEST_BYTES], claimed)}
        self.named = {layer: (self.blob, self.path.stat().st_size)}


def begun(root: Path, lineage: str) -> Path:
    """A checkpoint of the step that has another layer alone."""
    opened = OpenCheckpoint(root, SPEC, STEP, 0, lineage)
    opened.begin()
    state = LayerState.genesis(SPEC, 0)
    state.version = STEP
    opened.add(0, state.to_bytes())
    opened.end()
    return opened.directory


def fetched(
    directory: Path, announced: AnnouncedFiles, meanwhile: Callable[[], object], *files: File
) -> Exception | None:
    """The only holder gives its files, and something happens before the end of the first one."""
    by_blob = {file.blob: file.path for file in files}

    class Blobs:
        async def fetch(self, blob: str, donors: Any, target: Path, size_bytes: int) -> None:
            meanwhile()
            target.write_bytes(by_blob[blob].read_bytes())

    async def scene() -> Exception | None:
        fetches = LayerFetches(Blobs(), announced, _Room(), asyncio.Lock())  # type: ignore[arg-type]
        named = {layer: file for each in files for layer, file in each.named.items()}
        told = {"holder": CheckpointFiles(STEP, LINEAGE, named)}
        return await fetches.complete(directory, told, (), _came)

    return asyncio.run(scene())


class _Room:
    def require(self, layers: object) -> None: ...

    def took(self) -> None: ...


async def _came() -> None: ...


def test_a_file_of_a_step_that_was_done_again_has_nobody_refuse_the_new_one(
    tmp_path: Path,
) -> None:
    """It was compared with what was claimed of the new one, which then was taken from nobody."""
    before, after = File(tmp_path, "before", 1.0), File(tmp_path, "after", 2.0)
    announced, root = AnnouncedFiles(SPEC), tmp_path / "checkpoints"
    announced.agree(STEP, before.agreed)
    directory = begun(root, LINEAGE)

    def goes_back() -> None:
        begun(root, OTHER)
        announced.agree(STEP, after.agreed)

    fetched(directory, announced, goes_back, before)
    manifest = read_manifest(directory)
    assert manifest.lineage == OTHER and str(LAYER) not in manifest.layers
    told = {"holder": CheckpointFiles(STEP, OTHER, after.named)}
    assert announced.offers_of(LAYER, manifest, told) == {"holder": after.named[LAYER]}


def test_of_a_step_of_which_nothing_is_known_a_file_that_fewer_name_is_not_taken(
    tmp_path: Path,
) -> None:
    """A peer that was started again had heard none of the claims of the steps before. Where the
    others' file was slow to come, it took what one member named that never had the layer."""
    saved, other = File(tmp_path, "saved", 1.0), File(tmp_path, "other", 2.0)
    manifest = read_manifest(begun(tmp_path / "checkpoints", LINEAGE))
    told = {it: CheckpointFiles(STEP, LINEAGE, saved.named) for it in ("holder", "another")}
    told["liar"] = CheckpointFiles(STEP, LINEAGE, other.named)
    announced = AnnouncedFiles(SPEC)
    assert announced.offers_of(LAYER, manifest, told).keys() == {"holder", "another"}
    announced.agree(STEP, other.agreed)
    assert announced.offers_of(LAYER, manifest, told).keys() == {"liar"}, "it is what was claimed"


@pytest.mark.parametrize("is_true", [True, False])
def test_a_holder_that_takes_long_is_held_to_its_claim(tmp_path: Path, is_true: bool) -> None:
    """What was claimed was forgotten after four more checkpoints, and any parameters would do."""
    files = [File(tmp_path, f"file {n}", 1.0, is_true, n) for n in (LAYER, LAYER + 1)]
    announced, agreed = AnnouncedFiles(SPEC), files[0].agreed | files[1].agreed
    announced.agree(STEP, agreed)
    directory = begun(tmp_path / "checkpoints", LINEAGE)

    def others_are_saved() -> None:
        for step in range(STEP + 1, STEP + 1 + STEPS_REMEMBERED):
            announced.agree(step, agreed)

    failure = fetched(directory, announced, others_are_saved, *files)
    assert len(read_manifest(directory).layers) == (3 if is_true else 1)
    assert (failure is None) == is_true
    announced.agree(STEP + 10, agreed)
    assert len(announced._agreed) == STEPS_REMEMBERED + 1, "no more are remembered for that"


def test_a_holder_of_an_empty_file_keeps_no_other_layer_from_coming(tmp_path: Path) -> None:
    """It had signed that file's digest. What fewest have is asked for first, and the error ended
    all fetching, each time: no checkpoint became whole, nor had two disks one."""
    other = File(tmp_path, "other", 1.0, True, LAYER + 1)
    empty = File(tmp_path, "empty", 1.0)
    empty.path.write_bytes(b"")
    empty.blob = file_digest(empty.path)
    digest, claimed = bytes.fromhex(empty.blob)[:DIGEST_BYTES], empty.agreed[LAYER].parameters
    empty.agreed = {LAYER: AgreedState(digest, claimed)}
    empty.named = {LAYER: (empty.blob, 1)}
    announced = AnnouncedFiles(SPEC)
    announced.agree(STEP, empty.agreed | other.agreed)
    directory = begun(tmp_path / "checkpoints", LINEAGE)
    failure = fetched(directory, announced, lambda: None, empty, other)
    assert isinstance(failure, UserError)
    assert str(LAYER + 1) in read_manifest(directory).layers
