"""Checkpoints survive crashes at any byte, damage, other peers' layers and a full disk."""

import contextvars
import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.lineage import Epochs, marked
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.audit_spec import UNDO_COPIES
from p2p_dtfm.daemon.state_transfer.checkpoints.pruning import prune
from p2p_dtfm.ports import disk
from p2p_dtfm.train.model.checkpoint import (
    CheckpointFailed,
    add_layer_file,
    complete,
    layer_path,
    list_checkpoints,
    load_layer,
    read_manifest,
    run_directory_of,
    take_back,
    worth_keeping,
)
from p2p_dtfm.train.model.layer_state import LayerState
from tests.train.saved_layers import save_layers


def states_at(spec: RunSpec, step: int, layers: range = range(5)) -> list[LayerState]:
    states = [LayerState.genesis(spec, layer) for layer in layers]
    for state in states:
        for _ in range(step):
            state.apply(torch.ones(state.parameter_count), 1.0, 0.01)
    return states


def save(root: Path, spec: RunSpec, step: int, layers: range = range(5), lineage: str = "") -> Path:
    states, tokens = states_at(spec, step, layers), step * spec.tokens_per_step
    return save_layers(root, spec, step, tokens, states, lineage)


def steps(root: Path) -> list[int]:
    return [checkpoint.manifest.step for checkpoint in list_checkpoints(root)]


def test_what_was_saved_is_loaded(spec: RunSpec, tmp_path: Path) -> None:
    directory = save(tmp_path, spec, 2)
    assert directory.name == "step-00000002" and complete(directory)
    for state in states_at(spec, 2):
        loaded = load_layer(directory, state.layer)
        assert (loaded.version, loaded.digest()) == (2, state.digest())
    manifest = read_manifest(directory)
    assert manifest.spec() == spec and manifest.committed_tokens == 2 * spec.tokens_per_step
    assert not [path for path in directory.iterdir() if path.name.endswith(".partial")]


def test_a_checkpoint_below_the_root_has_a_directory_of_its_run() -> None:
    """`generate` looked for the tokenizer above the root, and ended with a traceback."""
    assert run_directory_of(Path("/step-00000008")) == Path("/")
    assert run_directory_of(Path("/r/checkpoints/step-00000008")) == Path("/r")


def test_peers_that_hold_parts_make_a_whole(spec: RunSpec, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    directory = save(ours, spec, 1, range(0, 3))
    other = save(theirs, spec, 1, range(3, 5))
    assert not complete(directory) and steps(ours) == [1]
    with pytest.raises(UserError, match="lacks layer 4"):
        load_layer(directory, 4)
    for layer in (3, 4):
        add_layer_file(directory, layer, layer_path(other, layer))
    assert complete(directory) and list_checkpoints(ours)[0].layers == (0, 1, 2, 3, 4)
    late = save(theirs, spec, 2, range(3, 5))
    for bad in (layer_path(late, 3), layer_path(other, 4), tmp_path / "nothing"):
        with pytest.raises(UserError):
            add_layer_file(directory, 3, bad)
    assert complete(directory), "a refused file must not harm what is there"


def test_saving_in_two_goes_keeps_the_first(spec: RunSpec, tmp_path: Path) -> None:
    save(tmp_path, spec, 1, range(0, 2))
    assert complete(save(tmp_path, spec, 1, range(2, 5)))
    save_layers(tmp_path, spec, 1, spec.tokens_per_step, states_at(spec, 1)[:2], lineage="other")
    assert list_checkpoints(tmp_path)[0].layers == (0, 1), "another lineage replaces the old one"


def test_a_crash_at_any_point_leaves_the_older_one(spec: RunSpec, tmp_path: Path) -> None:
    """The writes of a save, cut after each file and inside each file."""
    finished = save(tmp_path / "finished", spec, 2)
    order = [layer_path(finished, layer).name for layer in range(5)] + ["manifest.json"]
    for whole_files in range(len(order)):
        for cut in (0, 1, 100):
            root = tmp_path / f"crash-{whole_files}-{cut}"
            save(root, spec, 1)
            torn = root / finished.name
            torn.mkdir()
            for name in order[:whole_files]:
                shutil.copy(finished / name, torn / name)
            payload = (finished / order[whole_files]).read_bytes()[:cut]
            (torn / (order[whole_files] + ".partial")).write_bytes(payload)
            assert steps(root) == [1] and not complete(torn)
            assert complete(save(root, spec, 2)), "the save can be done again"
            assert steps(root) == [2, 1]


def test_truncated_and_changed_files_are_named(spec: RunSpec, tmp_path: Path) -> None:
    directory = save(tmp_path, spec, 1)
    path = layer_path(directory, 2)
    payload = path.read_bytes()
    changed = bytearray(payload)
    changed[-5] ^= 1
    for damaged, listed in ((bytes(changed), [1]), (payload[:-1], []), (b"", [])):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=path.name) as caught:
            load_layer(directory, 2)
        assert "copy it again" in caught.value.fixes[0]
        assert not complete(directory) and steps(tmp_path) == listed
    path.unlink()
    assert steps(tmp_path) == [] and not complete(directory)


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"format": 2}', b"\xff" * 100, b" " * (1 << 21)]
)
def test_a_damaged_manifest_is_no_checkpoint(spec: RunSpec, tmp_path: Path, damage: bytes) -> None:
    directory = save(tmp_path, spec, 1)
    (directory / "manifest.json").write_bytes(damage)
    assert steps(tmp_path) == [] and not complete(directory)
    with pytest.raises(UserError, match=r"manifest\.json"):
        load_layer(directory, 0)


def test_a_manifest_that_is_a_pipe_is_no_checkpoint(spec: RunSpec, tmp_path: Path) -> None:
    """Nothing ever comes from a pipe into which nobody writes: who opened it waited for ever."""
    path = save(tmp_path, spec, 1) / "manifest.json"
    path.unlink()
    os.mkfifo(path)
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.append(steps(tmp_path)), daemon=True)
    reader.start()
    reader.join(5.0)
    assert found == [[]]
    with pytest.raises(UserError, match=r"manifest\.json cannot be read: it is no file"):
        load_layer(path.parent, 0)


def test_a_manifest_that_lies_about_its_run_is_refused(spec: RunSpec, tmp_path: Path) -> None:
    directory = save(tmp_path, spec, 1)
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace(spec.digest(), "0" * 64))
    assert steps(tmp_path) == []
    path.write_text(path.read_text().replace(spec.canonical_bytes().hex(), "c1"))
    assert steps(tmp_path) == []


def test_pruning_keeps_the_newest_and_clears_older_wrecks(spec: RunSpec, tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, spec, step)
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    (tmp_path / "notes").mkdir()
    assert [path.name for path in prune(tmp_path, 2)] == ["step-00000001", "step-00000002"]
    assert steps(tmp_path) == [4, 3] and (tmp_path / "notes").is_dir()
    assert prune(tmp_path, 2) == []


def test_pruning_keeps_what_was_just_made_though_others_are_of_later_steps(
    spec: RunSpec, tmp_path: Path
) -> None:
    """The others are of a side of a split swarm that this peer has given up."""
    for step in (3, 8, 9):
        save(tmp_path, spec, step)
    assert prune(tmp_path, 2, made=3) == [] and steps(tmp_path) == [9, 8, 3]
    save(tmp_path, spec, 4)
    prune(tmp_path, 2, made=4)
    assert steps(tmp_path) == [9, 8, 4]


def test_states_to_go_back_to_stay_beside_the_newest_and_are_bounded(
    spec: RunSpec, tmp_path: Path
) -> None:
    for step in range(1, 20):
        save(tmp_path, spec, step, range(1))
        prune(tmp_path, 2, made=step, undo_every=3)
    assert steps(tmp_path) == [19, 18, 15, 12, 9]
    kept = worth_keeping(list_checkpoints(tmp_path), 1, 3)
    assert [it.manifest.step for it in kept] == [19, 18, 15, 12, 9]
    assert len(worth_keeping(list_checkpoints(tmp_path), 0, 3)) == UNDO_COPIES
    assert worth_keeping(list_checkpoints(tmp_path), 1, 0) == kept[:1]


def test_what_was_taken_back_goes_and_the_state_before_it_gets_the_new_name(
    spec: RunSpec, tmp_path: Path
) -> None:
    for step in (2, 4, 6, 8):
        save(tmp_path, spec, step, lineage=f"{step:064x}")
    now = marked(f"{4:064x}", Epochs(1, (4,)))
    gone = take_back(tmp_path, now, 4)
    assert sorted(path.name for path in gone) == ["step-00000006", "step-00000008"]
    found = {it.manifest.step: it.manifest.lineage for it in list_checkpoints(tmp_path)}
    assert found == {2: f"{2:064x}", 4: now}
    assert complete(tmp_path / "step-00000004")
    save(tmp_path, spec, 7, lineage=marked("7" * 64, Epochs(1, (4,))))
    save(tmp_path, spec, 9, lineage="9" * 64)
    assert steps(tmp_path)[0] == 7, "of a later epoch, though the other is longer"
    assert take_back(tmp_path, marked("7" * 64, Epochs(1, (4,))), 7) == [tmp_path / "step-00000009"]


def test_no_place_to_write_is_an_error_to_live_with(spec: RunSpec, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    with pytest.raises(CheckpointFailed) as caught:
        save(blocked, spec, 1)
    assert "make it writable" in caught.value.fixes[0]
    assert list_checkpoints(blocked) == []


def test_full_disk_leaves_the_older_checkpoint(spec: RunSpec, tmp_path: Path) -> None:
    """A file size limit stands for the full disk: the kernel refuses the write the same way."""
    import resource
    import signal

    save(tmp_path, spec, 1)
    states = states_at(spec, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointFailed, match="step-00000002"):
            save_layers(tmp_path, spec, 2, 0, states)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert steps(tmp_path) == [1]
    assert not list((tmp_path / "step-00000002").glob("*.partial")), "it must not hold space"
    save_layers(tmp_path, spec, 2, 0, states)
    assert steps(tmp_path) == [2, 1]


class _FillsUp(disk.MachineDisk):
    """A disk that has room for so many files more."""

    def __init__(self, room: int) -> None:
        self._room = room

    def write_whole(self, path: Path, payload: disk.Payload, mode: int) -> None:
        if self._room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room -= 1
        super().write_whole(path, payload, mode)


def test_what_did_not_become_a_checkpoint_does_not_keep_the_disk_full(
    spec: RunSpec, tmp_path: Path
) -> None:
    """Each failed checkpoint filled the room that there was, until nothing else could be
    written."""
    save(tmp_path, spec, 1, range(2))

    def on_a_disk_that_fills_up(step: int, layers: range, room: int) -> None:
        disk.live_by(_FillsUp(room))
        with pytest.raises(CheckpointFailed, match="No space left"):
            save(tmp_path, spec, step, layers)

    for step, layers, room in ((2, range(5), 3), (3, range(5), 5), (1, range(2, 5), 2)):
        contextvars.copy_context().run(on_a_disk_that_fills_up, step, layers, room)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("layer-*"))
    assert [str(path) for path in files] == [
        f"step-00000001/layer-000{layer}.safetensors" for layer in range(2)
    ]
    assert load_layer(tmp_path / "step-00000001", 1).version == 1


def test_what_a_checkpoint_replaces_does_not_keep_the_disk_full(
    spec: RunSpec, tmp_path: Path
) -> None:
    """Of another side of a split swarm, or of a life that was killed, the files of all layers
    stayed that this save did not write. No manifest named them, and where the disk was too full for
    this save it was so for the next one."""
    directory = save(tmp_path, spec, 1)
    save(tmp_path, spec, 1, range(2), lineage="other")
    files = [layer_path(directory, layer) for layer in range(2)]
    assert sorted(directory.glob("layer-*")) == files
    (directory / "manifest.json").unlink()

    def on_a_disk_that_is_full() -> None:
        disk.live_by(_FillsUp(0))
        with pytest.raises(CheckpointFailed, match="No space left"):
            save(tmp_path, spec, 1, range(3, 4))

    contextvars.copy_context().run(on_a_disk_that_is_full)
    assert list(directory.glob("layer-*")) == []
