"""Given weights as the start of a run: parameters by layer, named by the hash of their files.

    initial/initial.json             digest and size of each layer's file
    initial/layer-0000.safetensors   parameters only; the optimizer starts empty
    initial/origin.json              if there is one: the model's own small files, in one

The digest of initial.json is `model.initial` in the run spec. So the run spec's own digest, which
names the run, covers the weights, and a layer's file may come from anybody.
"""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
import numpy
import torch
from msgspec import Meta
from torch import Tensor

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.data.blob_store import file_digest
from p2p_dtfm.train.model.gpt import build_layer, layer_count, plain_entries
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.lora.adapted import has_base, set_base
from p2p_dtfm.train.model.tensor_file import file_bytes, header, write_tensors

MANIFEST_NAME = "initial.json"
ORIGIN_FILES_NAME = "origin.json"
INITIAL_LIMIT_BYTES = 1 << 20
ORIGIN_LIMIT_BYTES = 4 << 20
_METADATA = {"format": "pt"}


class InitialFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's file."""

    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    bytes: Annotated[int, Meta(ge=1, lt=1 << 50)]


class InitialState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of all layers, in order."""

    format: int
    layers: Annotated[tuple[InitialFile, ...], Meta(min_length=3, max_length=1026)]
    origin: InitialFile | msgspec.UnsetType = msgspec.UNSET
    """What the model's directory says besides its weights; training needs none of it. Unset where
    it did not travel with the weights, as in files from before this field."""

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self, order="sorted")

    def digest(self) -> str:
        return digest_bytes(self.to_bytes())


def write_initial(
    folder: Path,
    spec: RunSpec,
    parameters: Callable[[int], Iterable[Tensor]],
    origin: bytes | None = None,
) -> InitialState:
    """Write `folder` from `parameters(layer)`, tensors in canonical order. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for layer in range(layer_count(spec)):
        path = initial_layer_path(folder, layer)
        write_tensors(path, plain_entries(spec, layer), _METADATA, parameters(layer))
        files.append(InitialFile(file_digest(path), path.stat().st_size))
    told: InitialFile | msgspec.UnsetType = msgspec.UNSET
    if origin is not None:
        assert len(origin) <= ORIGIN_LIMIT_BYTES, f"{len(origin)} bytes"
        (folder / ORIGIN_FILES_NAME).write_bytes(origin)
        told = InitialFile(digest_bytes(origin), len(origin))
    initial = InitialState(1, tuple(files), told)
    (folder / MANIFEST_NAME).write_bytes(initial.to_bytes())
    return initial


def initial_layer_path(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:04d}.safetensors"


def initial_paths(folder: Path, spec: RunSpec) -> list[Path]:
    """All files of `folder`, if they are those that the run spec names: initial.json, those of the
    layers, and the model's own file if it travelled with them. Raises `UserError`."""
    fix = f"copy the directory {folder.name}/ along with the run spec, or import the model anew"
    path = folder / MANIFEST_NAME
    try:
        payload = path.read_bytes()
        initial = parse_initial(payload, spec)
        paths = [initial_layer_path(folder, layer) for layer in range(len(initial.layers))]
        files = list(initial.layers)
        if isinstance(initial.origin, InitialFile):
            files.append(initial.origin)
            paths.append(folder / ORIGIN_FILES_NAME)
        for file, found in zip(files, paths, strict=True):
            if file_digest(found) != file.digest:
                raise UserError(f"{found} is not the file that was imported", fix)
    except OSError as error:
        raise UserError(
            f"the run starts from given weights, and {error.filename or path} cannot be read: "
            f"{error.strerror}",
            fix,
        ) from error
    except PeerFault as error:
        raise UserError(f"{path} cannot be used: {error.cause}", fix) from error
    return [path, *paths]


def parse_initial(payload: bytes, spec: RunSpec) -> InitialState:
    """Read an initial.json; it must be the one that the run spec names. Raises `PeerFault`."""
    if digest_bytes(payload) != spec.model.initial:
        raise PeerFault(f"initial state that does not hash to {spec.model.initial[:12]}")
    try:
        initial = msgspec.json.decode(payload, type=InitialState)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerFault(f"not an initial state: {error}") from error
    if initial.format != 1:
        raise PeerFault(f"initial state of format {initial.format}, this version reads 1")
    if len(initial.layers) != layer_count(spec):
        raise PeerFault(f"initial state of {len(initial.layers)} layers, not {layer_count(spec)}")
    if isinstance(initial.origin, InitialFile) and initial.origin.bytes > ORIGIN_LIMIT_BYTES:
        raise PeerFault(f"initial state with {initial.origin.bytes} bytes besides its layers")
    for layer, file in enumerate(initial.layers):
        if file.bytes != _expected_bytes(spec, layer):
            raise PeerFault(f"initial state whose layer {layer} has {file.bytes} bytes")
    return initial


def named_as_initial(payload: bytes) -> frozenset[str]:
    """The digests of all files that this payload names, if it is the initial.json of any run."""
    try:
        initial = msgspec.json.decode(payload, type=InitialState)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return frozenset()
    origin = (initial.origin,) if isinstance(initial.origin, InitialFile) else ()
    return frozenset(file.digest for file in (*initial.layers, *origin))


def initial_layer_state(
    spec: RunSpec, layer: int, path: Path, device: torch.device | str = "cpu"
) -> LayerState:
    """The state before the first step, from a layer's file. Where the run trains adapters, what is
    frozen comes from there. Raises `PeerFault` if the file is not one of that layer."""
    tensors = given_tensors(spec, layer, path)
    if spec.trains_adapters:
        state = LayerState.genesis(spec, layer, device)
        set_base(state.module, [(name, tensor.to(device)) for name, tensor in tensors])
        return state
    module = build_layer(spec, layer)
    with torch.no_grad():
        for parameter, (_, tensor) in zip(module.parameters(), tensors, strict=True):
            parameter.copy_(tensor)
    count = sum(tensor.numel() for _, tensor in tensors)
    return LayerState(spec, layer, module.to(device), 0, torch.zeros(2, count))


def attach_base(state: LayerState, path: Path) -> None:
    """Give an adapted layer its frozen parameters, if it lacks them. Raises as `given_tensors`."""
    if not has_base(state.module):
        tensors = given_tensors(state.spec, state.layer, path)
        set_base(state.module, [(name, tensor.to(state.device)) for name, tensor in tensors])


def given_tensors(spec: RunSpec, layer: int, path: Path) -> list[tuple[str, Tensor]]:
    """A layer's given parameters. Raises `PeerFault` if the file does not hold them, and
    OSError."""
    entries = plain_entries(spec, layer)
    head = header(entries, _METADATA)
    with path.open("rb") as file:
        is_ours = file.read(len(head)) == head
    if not is_ours or path.stat().st_size != _expected_bytes(spec, layer):
        raise PeerFault(f"initial state of layer {layer} that is not one of this run")
    values = numpy.fromfile(path, dtype="<f4", offset=len(head))
    if not numpy.isfinite(values).all():
        raise PeerFault(f"initial state of layer {layer} with values that are no numbers")
    pieces = torch.from_numpy(values).split([math.prod(shape) for _, shape in entries])
    return [(name, piece.view(shape)) for (name, shape), piece in zip(entries, pieces, strict=True)]


def _expected_bytes(spec: RunSpec, layer: int) -> int:
    return file_bytes(plain_entries(spec, layer), _METADATA)
