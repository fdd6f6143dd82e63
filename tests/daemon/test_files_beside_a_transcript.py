"""Whoever gives a transcript away gives the files beside it, too. They may be of any size, and lead
to any place."""

from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.proof.from_disk import sample_of
from p2p_dtfm.train.model.checkpoint import (
    LayerFile,
    checkpoint_directory,
    layer_path,
    list_checkpoints,
    read_manifest,
)
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.builders import run_spec
from tests.train.saved_layers import save_layers

STEP = 0


def test_a_file_of_any_size_may_lie_in_the_place_of_the_datas_manifest(tmp_path: Path) -> None:
    """All of it was read before anything was said of it."""
    spec = run_spec(data={"manifest": "ab" * 32})
    (tmp_path / "blobs").mkdir()
    with (tmp_path / "blobs" / spec.data.manifest).open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(UserError, match="damaged"):
        sample_of(spec, {}, tmp_path, None, lambda step, last: None)


def test_a_layers_file_may_lead_to_what_has_no_end(tmp_path: Path) -> None:
    """A device is said to have no length. Its giver had written 0, and it was read for ever."""
    spec = run_spec(data={"manifest": "ab" * 32})
    save_layers(tmp_path, spec, STEP, 0, [LayerState.genesis(spec, 1)])
    place = checkpoint_directory(tmp_path, STEP)
    assert [it.directory for it in list_checkpoints(tmp_path)] == [place]
    empty = msgspec.structs.replace(read_manifest(place), layers={"1": LayerFile(0, "ab" * 32)})
    (place / "manifest.json").write_bytes(msgspec.json.encode(empty))
    layer_path(place, 1).unlink()
    layer_path(place, 1).symlink_to("/dev/zero")
    assert list_checkpoints(tmp_path) == []
