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
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.lineage import epochs_of, is_undone, unmarked
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.audit_spec import UNDO_COPIES
from p2p_dtfm.ports import disk, rarely
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState, version_of

_MANIFEST = "manifest.json"
_MANIFEST_LIMIT_BYTES = 1 << 20
MAPPED_LEAST_BYTES = 16 << 20
"""Least size of a file that is mapped; smaller files are read at once."""
READ_BYTES = 4 << 20
_STEP_NAME = re.compile(r"step-([0-9]{8,12})")


class CheckpointFailed(UserError):
    """The disk did not take a checkpoint: it is full, read-only or gone. Training can go on."""


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
    """The run spec's canonical bytes in hexadecimal."""
    step: int
    committed_tokens: int
    lineage: str
    layers: dict[str, LayerFile]
    """By layer number; only layers whose files are present."""

    def spec(self) -> RunSpec:
        return _spec_of(self.run_spec)


@functools.lru_cache(maxsize=16)
def _spec_of(text: str) -> RunSpec:
    """The run spec of a manifest. It is cached, as manifests of one run all say the same."""
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
    """The directory of a checkpoint's run, however the checkpoint is named. A checkpoint that was
    copied elsewhere may have nothing above it; then what is missing is reported later."""
    return checkpoint.resolve().parent.parent


def checkpoint_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def layer_path(directory: Path, layer: int) -> Path:
    return directory / f"layer-{layer:04d}.safetensors"


class OpenCheckpoint:
    """A checkpoint that is written a layer at a time: `begin`, `add` each layer, `end`.

    A directory of the same run, step and lineage keeps its other layers; any other content is
    replaced. All methods raise `CheckpointFailed`. What an earlier save wrote is then still sound.
    What this one wrote is removed: else a full disk would stay full of it.
    """

    def __init__(
        self, root: Path, spec: RunSpec, step: int, committed_tokens: int, lineage: str = ""
    ) -> None:
        self.directory = checkpoint_directory(root, step)
        self.written: set[int] = set()
        self._files: dict[str, LayerFile] = {}
        self._manifest = CheckpointManifest(
            format=1,
            run_digest=spec.digest(),
            run_spec=spec.canonical_bytes().hex(),
            step=step,
            committed_tokens=committed_tokens,
            lineage=lineage,
            layers={},
        )

    def begin(self) -> None:
        with _disk_errors(self.directory):
            for made in (self.directory.parent, self.directory):
                made.mkdir(exist_ok=True)  # no run's directory: its home may have been moved away
            self._files = dict(self._named())
            if not self._files:
                (self.directory / _MANIFEST).unlink(missing_ok=True)
                for unnamed in self.directory.glob("layer-*.safetensors"):
                    unnamed.unlink(missing_ok=True)

    def add(self, layer: int, payload: bytes | memoryview) -> None:
        """Write the file of the layer's state at this step."""
        with self._or_nothing():
            self._files[str(layer)] = _write_layer(self.directory, layer, payload)
        self.written.add(layer)

    def end(self) -> None:
        """Write the manifest: from here on the checkpoint exists."""
        with self._or_nothing():
            _write_manifest(
                self.directory, msgspec.structs.replace(self._manifest, layers=self._files)
            )

    def _named(self) -> dict[str, LayerFile]:
        return _same_checkpoint(self.directory, self._manifest)

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        with _disk_errors(self.directory):
            try:
                yield
            except OSError:
                for layer in self._files.keys() - self._named().keys():
                    layer_path(self.directory, int(layer)).unlink(missing_ok=True)
                raise


def add_layer_file(directory: Path, layer: int, source: Path) -> None:
    """Copy a layer's file that came from elsewhere into a checkpoint that lacks it. It is never in
    memory whole: the layer may be larger than all that this peer holds.

    Raises `UserError` if it is not the state of that layer at the checkpoint's step, and
    `CheckpointFailed` if it cannot be written.
    """
    manifest = read_manifest(directory)
    with _disk_errors(directory):
        version = version_of(manifest.spec(), layer, source)
    if version != manifest.step:
        raise UserError(
            f"{source} is of step {version}, the checkpoint {directory} of {manifest.step}",
            f"fetch layer {layer} of step {manifest.step}",
        )
    with _disk_errors(directory):
        files = {**manifest.layers, str(layer): _copy_layer(directory, layer, source)}
        _write_manifest(directory, msgspec.structs.replace(manifest, layers=files))


def read_manifest(directory: Path) -> CheckpointManifest:
    """The manifest of a checkpoint directory. Raises `UserError`."""
    path = directory / _MANIFEST
    try:
        if path.exists() and not path.is_file():  # from a pipe nothing may ever come
            raise ValueError("it is no file")
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
    """Whether there is a manifest, with however many layers."""
    return (directory / _MANIFEST).is_file()


def complete(directory: Path) -> bool:
    """Whether every layer of the model is there, each file with the digest of the manifest.

    Reads all files.
    """
    try:
        manifest = read_manifest(directory)
        for layer in range(layer_count(manifest.spec())):
            _require_sound(directory, manifest, layer)
    except UserError:
        return False
    return True


def load_layer(directory: Path, layer: int, device: torch.device | str = "cpu") -> LayerState:
    """One layer's state. A large one comes into memory only when something is computed with it;
    even before that its file may be removed. Raises `UserError` that names a missing or damaged
    file."""
    manifest = read_manifest(directory)
    spec, path = manifest.spec(), layer_path(directory, layer)
    file = manifest.layers.get(str(layer))
    is_large = file is not None and file.bytes >= MAPPED_LEAST_BYTES and not spec.trains_adapters
    if is_large and torch.device(device).type == "cpu":
        _require_sound(directory, manifest, layer)
        try:
            return LayerState.mapped(spec, layer, path)
        except (OSError, ValueError) as error:  # the file has been removed, or was cut
            raise _unreadable(path, error) from error
    payload = b"".join(_sound_parts(directory, manifest, layer))
    return LayerState.from_bytes(spec, layer, payload, device, str(path))


def list_checkpoints(root: Path, run: str = "") -> list[Checkpoint]:
    """Checkpoints, the newest first. Those of a later epoch come before those that it took back.
    Those without a sound manifest, or with a file missing, are left out; so are those of another
    run than `run`, if one is named, as somebody may have put them there.

    Compares the files' lengths only; `load_layer` and `complete` compare their digests.
    """
    found = []
    for directory in step_directories(root):
        try:
            manifest = read_manifest(directory)
        except UserError:
            continue
        lengths = [
            (_length(layer_path(directory, int(layer))), file.bytes)
            for layer, file in manifest.layers.items()
        ]
        is_of_run = run in ("", manifest.run_digest)
        if is_of_run and manifest.layers and all(there == due for there, due in lengths):
            found.append(Checkpoint(directory, manifest))
    return sorted(found, key=_how_new, reverse=True)


def _how_new(checkpoint: Checkpoint) -> tuple[int, int]:
    manifest = checkpoint.manifest
    return epochs_of(manifest.lineage).number, manifest.step


def worth_keeping(found: list[Checkpoint], count: int, undo_every: int) -> list[Checkpoint]:
    """The checkpoints to keep of those on a disk, which come newest first. These are the newest
    `count`, and the newest of those to go back to, `undo_every` steps apart."""
    kept = found[:count]
    if undo_every:
        apart = [it for it in found if it.manifest.step % undo_every == 0][:UNDO_COPIES]
        kept += [it for it in apart if it not in kept]
    return kept


def fullest(found: list[Checkpoint], count: int = 1) -> list[Checkpoint]:
    """The newest of the checkpoints with the most layers, if there are any. Newer ones may have
    only this peer's own layers, while those of others are still on their way."""
    return sorted(found, key=lambda it: len(it.layers), reverse=True)[:count]


def take_back(root: Path, lineage: str, step: int) -> list[Path]:
    """Delete the checkpoints that training has taken back; it goes on from `step` of this lineage.
    The checkpoint that it goes on from gets that lineage. Returns the deleted directories. Raises
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


def remove_checkpoint(directory: Path) -> None:
    """Delete a checkpoint, unless another process does so now. Raises `CheckpointFailed`."""
    with _disk_errors(directory), contextlib.suppress(FileNotFoundError):
        (directory / _MANIFEST).unlink(missing_ok=True)  # from here on it counts as torn
        shutil.rmtree(directory)


def put_aside(directories: Sequence[Path]) -> list[Path]:
    """Put damaged checkpoints of one place aside, for whoever wants to look at them; returns where
    each is now. Those that were put aside there before are deleted. Raises `CheckpointFailed`."""
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
    """The layers of the manifest that is there, if it is of the same run, step and lineage."""
    try:
        present = read_manifest(directory)
    except UserError:
        return {}
    emptied = msgspec.structs.replace(present, layers={})
    return present.layers if emptied == manifest else {}


def _require_sound(directory: Path, manifest: CheckpointManifest, layer: int) -> None:
    for _ in _sound_parts(directory, manifest, layer):
        pass  # the whole file need not be in memory


def _sound_parts(directory: Path, manifest: CheckpointManifest, layer: int) -> Iterator[bytes]:
    """The parts of a layer's file. Raises `UserError`; after the last part, if the file is not the
    one that was written."""
    path = layer_path(directory, layer)
    expected = manifest.layers.get(str(layer))
    if expected is None:
        raise UserError(
            f"checkpoint {directory} lacks layer {layer}: who saved it did not hold that layer",
            f"copy {path.name} from the same step of a peer that held it",
        )
    digest = hashlib.blake2b(digest_size=32)
    try:
        if _length(path) == expected.bytes:
            rarely.fails("layer unreadable")
            with path.open("rb") as file:
                while part := file.read(READ_BYTES):
                    digest.update(part)
                    yield part
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest.hexdigest() != expected.digest:
        raise UserError(
            f"{path} is damaged: it is not the file that was written",
            (
                f"copy it again from a peer that held layer {layer} at step {manifest.step}",
                f"delete {directory} and use the checkpoint before it",
            ),
        )


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read: {error}", f"make {path} readable")


def _length(path: Path) -> int:
    """-1 for what is no file. A link to a device has no length, and is read for ever."""
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1


def step_directories(root: Path) -> list[Path]:
    """All directories of steps, torn ones too; the oldest first."""
    if not root.is_dir():
        return []
    return sorted(d for d in root.iterdir() if _STEP_NAME.fullmatch(d.name) and d.is_dir())


def step_of(directory: Path) -> int:
    match = _STEP_NAME.fullmatch(directory.name)
    assert match, directory
    return int(match[1])


def _write_layer(directory: Path, layer: int, payload: bytes | memoryview) -> LayerFile:
    disk.write_whole(layer_path(directory, layer), payload)
    digest = hashlib.blake2b(payload, digest_size=32)
    return LayerFile(bytes=len(payload), digest=digest.hexdigest())


def _copy_layer(directory: Path, layer: int, source: Path) -> LayerFile:
    """As `_write_layer`, of a file. It is read and not mapped: where its disk fails, a mapped one
    ends the process. Some that another machine shares map none."""
    place, digest, size_bytes = layer_path(directory, layer), hashlib.blake2b(digest_size=32), 0
    temporary = place.with_name(place.name + disk.PARTIAL)
    try:
        with source.open("rb") as given, temporary.open("wb") as file:
            while part := given.read(READ_BYTES):
                disk.write(file, part)
                digest.update(part)
                size_bytes += len(part)
            file.flush()
            os.fsync(file.fileno())
        disk.name(temporary, place)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return LayerFile(bytes=size_bytes, digest=digest.hexdigest())


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
