"""Checkpoints: one safetensors file for each layer, and a manifest that is written last.

    checkpoints/step-00000100/layer-0003.safetensors
    checkpoints/step-00000100/manifest.json

Every file is written beside its place, forced to the disk and renamed, so a file with its final
name is whole. A peer saves the layers it holds; files of other layers may be added later. Nothing
here depends on the plan: any set of peers can load what any other set saved.

One process writes to a directory at a time.
"""

import contextlib
import functools
import hashlib
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.lineage import epochs_of, is_undone, unmarked
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.audit_spec import UNDO_COPIES
from p2p_dtfm.ports import disk
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerSnapshot, LayerState, version_in

_MANIFEST = "manifest.json"
_MANIFEST_LIMIT_BYTES = 1 << 20
_STEP_NAME = re.compile(r"step-([0-9]{8,12})")


class CheckpointFailed(UserError):
    """The disk did not take a checkpoint: full, read-only, gone. Training can go on without."""


class LayerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer's file as it was written."""

    bytes: int
    digest: str
    """Hexadecimal BLAKE2b-256 of the file."""


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint directory holds, and of which run."""

    format: int
    run_digest: str
    run_spec: str
    """Hexadecimal canonical bytes."""
    step: int
    committed_tokens: int
    lineage: str
    layers: dict[str, LayerFile]
    """By layer number; only the files that are present."""

    def spec(self) -> RunSpec:
        return _spec_of(self.run_spec)


@functools.lru_cache(maxsize=16)
def _spec_of(text: str) -> RunSpec:
    """Manifests of one run say the same again and again."""
    return RunSpec.from_canonical_bytes(bytes.fromhex(text))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk whose manifest is sound and whose files are there."""

    directory: Path
    manifest: CheckpointManifest

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(int(layer) for layer in self.manifest.layers))


def run_directory_of(checkpoint: Path) -> Path:
    """The run's directory in which a checkpoint lies, wherever it is named from. One that was
    copied elsewhere may have nothing above it; what is missing there is said then."""
    return checkpoint.resolve().parent.parent


def checkpoint_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def layer_path(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer:04d}.safetensors"


def save_layers(
    root: Path,
    spec: RunSpec,
    step: int,
    committed_tokens: int,
    states: Iterable[LayerState | LayerSnapshot],
    lineage: str = "",
) -> Path:
    """Write the layers' files, then the manifest; the directory of this step.

    A directory of the same run, step and lineage keeps its other layers; any other content is
    replaced. Raises `CheckpointFailed`; what an earlier save wrote is then still sound, and what
    this one wrote is gone: else a full disk would stay full of it.
    """
    directory = checkpoint_directory(root, step)
    manifest = CheckpointManifest(
        format=1,
        run_digest=spec.digest(),
        run_spec=spec.canonical_bytes().hex(),
        step=step,
        committed_tokens=committed_tokens,
        lineage=lineage,
        layers={},
    )
    with _disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        kept = _same_checkpoint(directory, manifest)
        if not kept:
            (directory / _MANIFEST).unlink(missing_ok=True)
        files = dict(kept)
        try:
            for state in states:
                assert state.version == step, (state.layer, state.version, step)
                files[str(state.layer)] = _write_layer(directory, state.layer, state.to_bytes())
            _write_manifest(directory, msgspec.structs.replace(manifest, layers=files))
        except OSError:
            for layer in files.keys() - _same_checkpoint(directory, manifest).keys():
                layer_path(directory, int(layer)).unlink(missing_ok=True)
            raise
    return directory


def add_layer_file(directory: Path, layer: int, source: Path) -> None:
    """Copy a layer's file that came from elsewhere into a checkpoint that lacks it.

    Raises `UserError` if it is not the state of that layer at the checkpoint's step, and
    `CheckpointFailed` if it cannot be written.
    """
    manifest = read_manifest(directory)
    with _disk_errors(directory):
        payload = source.read_bytes()
    version = version_in(manifest.spec(), layer, payload, str(source))
    if version != manifest.step:
        raise UserError(
            f"{source} is of step {version}, the checkpoint {directory} of {manifest.step}",
            f"fetch layer {layer} of step {manifest.step}",
        )
    with _disk_errors(directory):
        files = {**manifest.layers, str(layer): _write_layer(directory, layer, payload)}
        _write_manifest(directory, msgspec.structs.replace(manifest, layers=files))


def read_manifest(directory: Path) -> CheckpointManifest:
    """The manifest of a checkpoint directory. Raises `UserError`."""
    path = directory / _MANIFEST
    try:
        with path.open("rb") as file:
            payload = file.read(_MANIFEST_LIMIT_BYTES + 1)
        manifest = msgspec.json.decode(payload[:_MANIFEST_LIMIT_BYTES], type=CheckpointManifest)
        if not _is_sound(manifest):
            raise ValueError("its content contradicts itself")
    except (OSError, msgspec.MsgspecError, ValueError, PeerFault) as error:
        raise UserError(
            f"{directory} is not a checkpoint: {path} cannot be read: {error}",
            f"use another checkpoint; the newest is the step with the highest number in "
            f"{directory.parent}",
        ) from error
    return manifest


def is_begun(directory: Path) -> bool:
    """Whether there is a manifest, of however many layers."""
    return (directory / _MANIFEST).is_file()


def complete(directory: Path) -> bool:
    """Whether every layer of the model is there, each file with the digest of the manifest.

    Reads all files.
    """
    try:
        manifest = read_manifest(directory)
        for layer in range(layer_count(manifest.spec())):
            _check_layer(directory, manifest, layer)
    except UserError:
        return False
    return True


def load_layer(directory: Path, layer: int, device: torch.device | str = "cpu") -> LayerState:
    """One layer's state. Raises `UserError` naming the file that is missing or damaged."""
    manifest = read_manifest(directory)
    payload = _check_layer(directory, manifest, layer)
    path = str(layer_path(directory, layer))
    return LayerState.from_bytes(manifest.spec(), layer, payload, device, path)


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """Newest first, and those of a later epoch before what it took back; those without a sound
    manifest or with a file missing are left out.

    Compares the files' lengths only; `load_layer` and `complete` compare their digests.
    """
    found = []
    for directory in _step_directories(root):
        try:
            manifest = read_manifest(directory)
        except UserError:
            continue
        lengths = [
            (_length(layer_path(directory, int(layer))), file.bytes)
            for layer, file in manifest.layers.items()
        ]
        if manifest.layers and all(there == expected for there, expected in lengths):
            found.append(Checkpoint(directory, manifest))
    return sorted(found, key=_how_new, reverse=True)


def _how_new(checkpoint: Checkpoint) -> tuple[int, int]:
    manifest = checkpoint.manifest
    return epochs_of(manifest.lineage).number, manifest.step


def worth_keeping(found: list[Checkpoint], count: int, undo_every: int) -> list[Checkpoint]:
    """Of those on a disk, newest first: the newest `count`, and the newest of those that are kept
    to go back to, `undo_every` steps apart."""
    kept = found[:count]
    if undo_every:
        apart = [it for it in found if it.manifest.step % undo_every == 0][:UNDO_COPIES]
        kept += [it for it in apart if it not in kept]
    return kept


def fullest(found: list[Checkpoint], count: int = 1) -> list[Checkpoint]:
    """The newest of those with the most layers, if there are any: newer ones may be this peer's own
    layers and no more, while those of others are still on their way."""
    return sorted(found, key=lambda it: len(it.layers), reverse=True)[:count]


def take_back(root: Path, lineage: str, step: int) -> list[Path]:
    """Delete what training, which goes on from `step` of this lineage, has taken back; and name
    the one that it goes on from as training does. The deleted directories. Raises
    `CheckpointFailed`."""
    epochs, gone = epochs_of(lineage), []
    for checkpoint in list_checkpoints(root):
        manifest, directory = checkpoint.manifest, checkpoint.directory
        if is_undone(manifest.step, manifest.lineage, epochs):
            remove_checkpoint(directory)
            gone.append(directory)
        elif manifest.step == step and unmarked(manifest.lineage) == unmarked(lineage):
            with _disk_errors(directory):
                _write_manifest(directory, msgspec.structs.replace(manifest, lineage=lineage))
    return gone


def prune(root: Path, keep: int, made: int | None = None, undo_every: int = 0) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, and torn ones older than those.

    The one of step `made` stays as well: those of later steps may be of a side of a split swarm
    that was given up. So do those that are kept to go back to (`worth_keeping`). Returns the
    deleted directories. Raises `CheckpointFailed`.
    """
    assert keep >= 1, keep
    found = list_checkpoints(root)
    kept = [it.directory for n, it in enumerate(found) if n < keep or it.manifest.step == made]
    oldest = min((_step_of(directory) for directory in kept), default=0)
    kept += [it.directory for it in worth_keeping(found, 0, undo_every)]
    return _remove_but(kept, root, oldest)


def prune_parts(
    root: Path,
    made: int,
    newest: int,
    full: int,
    undo_every: int = 0,
    in_use: Collection[Path] = (),
) -> list[Path]:
    """Delete the oldest while those that are made here do not become whole, and torn ones with
    them: else nothing ever went, until the disk was full.

    Of those up to step `made` the `newest` stay, so many of the fullest, those that are kept to go
    back to (`worth_keeping`) and those `in_use`. Later ones may be of a side of a split swarm that
    was given up; they keep no place from these. Returns the deleted directories. Raises
    `CheckpointFailed`.
    """
    found = [it for it in list_checkpoints(root) if it.manifest.step <= made]
    kept = [it.directory for it in worth_keeping(found, newest, undo_every)]
    kept += [it.directory for it in fullest(found, full)]
    oldest = min((it.manifest.step for it in found[:newest]), default=0)
    return _remove_but([*kept, *in_use], root, oldest)


def _remove_but(kept: Collection[Path], root: Path, oldest: int) -> list[Path]:
    """All that is older than step `oldest`, but for what is kept."""
    doomed = [d for d in _step_directories(root) if d not in kept and _step_of(d) < oldest]
    for directory in doomed:
        remove_checkpoint(directory)
    return doomed


def remove_checkpoint(directory: Path) -> None:
    """Delete one, unless somebody else does at this moment. Raises `CheckpointFailed`."""
    with _disk_errors(directory), contextlib.suppress(FileNotFoundError):
        (directory / _MANIFEST).unlink(missing_ok=True)  # from here on it counts as torn
        shutil.rmtree(directory)


def put_aside(directories: Sequence[Path]) -> list[Path]:
    """Damaged ones of one place, for whoever wants to look at them: where each is now. What was put
    aside there before goes. Raises `CheckpointFailed`."""
    places = [it.with_name(f"damaged-{it.name}") for it in directories]
    with _disk_errors(directories[0]):
        for older in directories[0].parent.glob("damaged-*"):
            shutil.rmtree(older)
        for directory, aside in zip(directories, places, strict=True):
            directory.rename(aside)
    return places


def _is_sound(manifest: CheckpointManifest) -> bool:
    spec = manifest.spec()
    layers = {str(layer) for layer in range(layer_count(spec))}
    return (
        manifest.format == 1
        and spec.digest() == manifest.run_digest
        and manifest.step >= 0
        and manifest.layers.keys() <= layers
    )


def _same_checkpoint(directory: Path, manifest: CheckpointManifest) -> dict[str, LayerFile]:
    """The layers of a manifest already there, if it is of the same run, step and lineage."""
    try:
        present = read_manifest(directory)
    except UserError:
        return {}
    emptied = msgspec.structs.replace(present, layers={})
    return present.layers if emptied == manifest else {}


def _check_layer(directory: Path, manifest: CheckpointManifest, layer: int) -> bytes:
    """The bytes of a layer's file, if they are those that were written."""
    path = layer_path(directory, layer)
    expected = manifest.layers.get(str(layer))
    if expected is None:
        raise UserError(
            f"checkpoint {directory} lacks layer {layer}: who saved it did not hold that layer",
            f"copy {path.name} from the same step of a peer that held it",
        )
    try:
        payload = path.read_bytes() if _length(path) == expected.bytes else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}", f"make {path} readable") from error
    if _digest(payload) != expected.digest:
        raise UserError(
            f"{path} is damaged: it is not the file that was written",
            (
                f"copy it again from a peer that held layer {layer} at step {manifest.step}",
                f"delete {directory} and use the checkpoint before it",
            ),
        )
    return payload


def _digest(payload: bytes) -> str:
    return hashlib.blake2b(payload, digest_size=32).hexdigest()


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _step_directories(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(d for d in root.iterdir() if _STEP_NAME.fullmatch(d.name) and d.is_dir())


def _step_of(directory: Path) -> int:
    match = _STEP_NAME.fullmatch(directory.name)
    assert match, directory
    return int(match[1])


def _write_layer(directory: Path, layer: int, payload: bytes) -> LayerFile:
    disk.write_whole(layer_path(directory, layer), payload)
    return LayerFile(bytes=len(payload), digest=_digest(payload))


def _write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    disk.sync_directory(directory)  # the layers' files, before a manifest that names them
    layers = dict(sorted(manifest.layers.items(), key=lambda item: int(item[0])))
    payload = msgspec.json.encode(msgspec.structs.replace(manifest, layers=layers))
    disk.write_whole(directory / _MANIFEST, msgspec.json.format(payload) + b"\n")
    disk.sync_directory(directory)


@contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointFailed(
            f"no checkpoint in {directory}: {error.strerror or error}",
            f"free space on the disk of {directory}, or make it writable",
        ) from error
