"""The state of one layer: parameters, gradient, optimizer moments, version.

All four live in flat fp32 buffers, of which the module's parameters and their `.grad` are
views, in the order of `module.named_parameters()`. So a gradient is reduced without
being gathered first, and a state is copied or hashed as three runs of bytes.
"""

import hashlib
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import build_layer, initialise_layer, layer_entries
from p2p_dtfm.train.model.lora.adapted import has_base, move_trained
from p2p_dtfm.train.model.tensor_file import (
    STATE_HEADER_LIMIT_BYTES,
    entry_bytes,
    header,
    state_entries,
)
from p2p_dtfm.train.updates.layer_update import LayerUpdate

assert sys.byteorder == "little", "state travels as the memory's own bytes, which are little-endian"

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class LayerSnapshot:
    """A copy of a layer's state at one version, on the CPU; training may go on meanwhile."""

    run_digest: str
    layer: int
    version: int
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    parts: tuple[Tensor, Tensor, Tensor]
    """Parameters, first moments, second moments: flat fp32."""

    def to_bytes(self) -> memoryview:
        """A safetensors file; equal states have equal bytes."""
        return _file_of(_header(self.run_digest, self.layer, self.version, self.shapes), self.parts)

    def file_digest(self) -> bytes:
        """The first bytes of the digest of what `to_bytes` gives, as Prepared states them."""
        digest = hashlib.blake2b(digest_size=32)
        digest.update(_header(self.run_digest, self.layer, self.version, self.shapes))
        for part in self.parts:
            digest.update(part.numpy().data.cast("B"))
        return digest.digest()[:DIGEST_BYTES]

    def digest(self) -> str:
        """Hexadecimal BLAKE2b-256 of the parameters' and the moments' bytes."""
        digest = hashlib.blake2b(digest_size=32)
        for part in self.parts:
            digest.update(part.numpy().data.cast("B"))
        return digest.hexdigest()


class LayerState:
    """A layer that is trained here.

    `version` counts the committed steps that are in the parameters.
    """

    def __init__(
        self, spec: RunSpec, layer: int, module: nn.Module, version: int, moments: Tensor
    ) -> None:
        """Take over `module`, on its device, and `moments`: first and second, fp32 [2, count]."""
        self.spec = spec
        self.layer = layer
        self.version = version
        self.moves = 0
        self.shapes = _shapes_of(module)
        self._is_mapped = False
        self._take(module, moments)

    def _take(self, module: nn.Module, moments: Tensor) -> None:
        self._module = module
        self.parameters = torch.cat([it.detach().reshape(-1) for it in module.parameters()])
        assert self.parameters.dtype == torch.float32
        assert moments.shape == (2, self.parameters.numel()), moments.shape
        moments = moments.to(self.device)
        self.first_moments, self.second_moments = moments.unbind(0)
        self._gradient = torch.zeros_like(self.parameters)
        self.compute_with(self.parameters)
        kept = self.first_moments, self.second_moments
        self._update = LayerUpdate(
            self.spec, self.layer, self.update_shapes, kept, self.version, exact=True
        )

    @classmethod
    def mapped(cls, spec: RunSpec, layer: int, path: Path) -> "LayerState":
        """Like `from_bytes` of a file, but nothing of it is in memory until something is computed
        with it. So a peer may have all layers of a model on its disk that its memory does not hold.

        The file may be removed meanwhile, but not written to. Raises `UserError` and OSError.
        """
        view = _mapped(path)
        state = cls.__new__(cls)
        state.spec, state.layer, state.moves = spec, layer, 0
        state.shapes = _shapes(spec, layer)
        state.version = _check_header(
            view.data, len(view), spec.digest(), layer, state.shapes, str(path)
        )
        count = sum(math.prod(shape) for _, shape in state.shapes)
        values = numpy.asarray(view)[len(view) - 3 * 4 * count :].view("<f4").reshape(3, count)
        state.parameters, state.first_moments, state.second_moments = torch.from_numpy(values)
        state._is_mapped = True
        return state

    def be_in_memory(self) -> None:
        """Bring a mapped state into memory. Where it is mapped it lies as the file has it:
        computing there might round otherwise, and would see what others write to that disk."""
        if not self._is_mapped:
            return
        module = build_layer(self.spec, self.layer)
        start = 0
        with torch.no_grad():
            for parameter in module.parameters():
                here = slice(start, start + parameter.numel())
                parameter.copy_(self.parameters[here].view_as(parameter))
                start = here.stop
        moments = torch.stack([self.first_moments, self.second_moments])
        self._is_mapped = False
        self._take(module, moments)

    @property
    def module(self) -> nn.Module:
        self.be_in_memory()
        return self._module

    @property
    def gradient(self) -> Tensor:
        self.be_in_memory()
        return self._gradient

    @property
    def update_shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """As `shapes`, for an update. Matrices decay; one that a kind of layer does not train stays
        as it is, so it is a vector here."""
        return tuple(
            (name, tuple(it.shape) if it.requires_grad else (it.numel(),))
            for name, it in self.module.named_parameters()
        )

    @property
    def has_base(self) -> bool:
        """Whether the layer can compute: nothing frozen is left out."""
        return self._is_mapped or has_base(self._module)

    def compute_with(self, flat: Tensor) -> None:
        """Let the module's parameters be views of `flat`, fp32 in canonical order."""
        assert flat.shape == self.parameters.shape and flat.device == self.device
        start = 0
        for parameter in self.module.parameters():
            here = slice(start, start + parameter.numel())
            parameter.data = flat[here].view_as(parameter)
            parameter.grad = self.gradient[here].view_as(parameter)
            start = here.stop

    def move(self, device: torch.device | None) -> None:
        """Move the whole state to a device, to compute with it. With None it moves to the host,
        where a mapped state may stay mapped. Does nothing if the state is there."""
        if device is not None:
            self.be_in_memory()
        device = device or torch.device("cpu")
        if self.device == device:
            return
        parameters, gradient = self.parameters.to(device), self.gradient.to(device)
        kept = self.first_moments.to(device), self.second_moments.to(device)
        frozen = [(buffer, buffer.data.to(device)) for buffer in self.module.buffers()]
        self.moves += 1  # nothing takes memory any more: all is moved, or nothing
        self.parameters, self._gradient = parameters, gradient
        self.first_moments, self.second_moments = kept
        for buffer, moved in frozen:
            buffer.data = moved
        for parameter in self.module.parameters():
            parameter.grad = None  # that of the other device would not take the new data
        self.compute_with(self.parameters)
        made = self._update.steps_made
        self._update = LayerUpdate(
            self.spec, self.layer, self.update_shapes, kept, made, exact=True
        )

    @classmethod
    def genesis(cls, spec: RunSpec, layer: int, device: torch.device | str = "cpu") -> "LayerState":
        """The state before the first step, bit-equal on any machine."""
        module = build_layer(spec, layer)
        initialise_layer(module, spec, layer)
        move_trained(module, device)
        return cls(spec, layer, module, 0, torch.zeros(2, parameter_count(module)))

    @property
    def device(self) -> torch.device:
        return self.parameters.device

    @property
    def parameter_count(self) -> int:
        return self.parameters.numel()

    def gradient_vector(self) -> Tensor:
        """The accumulated gradient itself, flat fp32 in canonical order: a view, not a copy."""
        return self.gradient

    def zero_gradients(self) -> None:
        self.gradient.zero_()

    @torch.no_grad()
    def apply(self, reduced_gradient: Tensor, clip_scale: float, learning_rate: float) -> None:
        """One step with `clip_scale * reduced_gradient`; the version grows by one.

        The step is the optimizer's (`updates.layer_update`). Where a run synchronises locally, it
        is a step of SGD with Nesterov momentum (Sutskever et al. 2013, in PyTorch's form); the
        momentum is kept as the first moments.

        `reduced_gradient` is flat fp32 in canonical order and stays as it is, unless it is the
        gradient buffer, which is zero afterwards.
        """
        assert reduced_gradient.shape == self.gradient.shape, reduced_gradient.shape
        assert reduced_gradient.dtype == torch.float32, reduced_gradient.dtype
        torch.mul(reduced_gradient.to(self.device), clip_scale, out=self.gradient)
        for parameter in self.module.parameters():
            if not parameter.requires_grad and parameter.grad is not None:
                parameter.grad.zero_()  # a codec of few levels may have no zero
        if self.spec.sync.mode == "local":
            momentum = self.spec.sync.outer_momentum
            self.first_moments.mul_(momentum).add_(self.gradient)
            self.gradient.add_(self.first_moments * momentum)
            self.parameters.sub_(self.gradient.mul_(learning_rate))
        else:
            self._update.step(self.parameters, self.gradient, learning_rate)
        self.version += 1
        self.zero_gradients()

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.parameters, self.first_moments, self.second_moments

    def snapshot(self) -> LayerSnapshot:
        """A consistent copy, at the cost of one copy in memory."""
        first, second, third = (part.detach().to("cpu", copy=True) for part in self._parts())
        return LayerSnapshot(
            self.spec.digest(), self.layer, self.version, self.shapes, (first, second, third)
        )

    def seen_from_cpu(self) -> LayerSnapshot:
        """Like a snapshot, without the copy if the state is on the CPU. Use it at once, or when
        this state is not trained any more."""
        first, second, third = (part.detach().to("cpu") for part in self._parts())
        return LayerSnapshot(
            self.spec.digest(), self.layer, self.version, self.shapes, (first, second, third)
        )

    def to_bytes(self) -> memoryview:
        """Parameters and moments as a safetensors file with the version in its metadata: a copy."""
        head = _header(self.spec.digest(), self.layer, self.version, self.shapes)
        return _file_of(head, self._parts())

    def digest(self) -> str:
        """Hexadecimal BLAKE2b-256 of the parameters' and the moments' bytes."""
        return self.seen_from_cpu().digest()

    def file_digest(self) -> bytes:
        """See `LayerSnapshot.file_digest`."""
        return self.seen_from_cpu().file_digest()

    @classmethod
    def from_bytes(
        cls,
        spec: RunSpec,
        layer: int,
        payload: bytes | bytearray | memoryview,
        device: torch.device | str = "cpu",
        path: str | None = None,
    ) -> "LayerState":
        """Read what `to_bytes` wrote, for this run and layer, with these names, shapes and dtypes
        only.

        Anything else raises `UserError` naming `path`, or `PeerFault` if there is no path, because
        the bytes then come from another peer.
        """
        view = memoryview(payload).cast("B")
        module = build_layer(spec, layer)
        shapes = _shapes_of(module)
        version = _check_header(view, len(view), spec.digest(), layer, shapes, path)
        count = parameter_count(module)
        body = view[len(view) - 3 * 4 * count :]
        values = numpy.frombuffer(body, dtype="<f4").reshape(3, count)
        start = 0
        with torch.no_grad():
            for parameter in module.parameters():
                part = values[0, start : start + parameter.numel()].reshape(tuple(parameter.shape))
                numpy.copyto(parameter.detach().numpy(), part)
                start += parameter.numel()
        moments = torch.from_numpy(values[1:].copy())
        return cls(spec, layer, move_trained(module, device), version, moments)


def snapshot_from(spec: RunSpec, layer: int, version: int, parts: Tensor) -> LayerSnapshot:
    """A snapshot of flat fp32 parameters, first and second moments; it takes them over."""
    shapes = _shapes(spec, layer)
    assert parts.shape == (3, sum(math.prod(shape) for _, shape in shapes)), parts.shape
    first, second, third = parts.unbind(0)
    return LayerSnapshot(spec.digest(), layer, version, shapes, (first, second, third))


def _shapes_of(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(it.shape)) for name, it in module.named_parameters())


def _shapes(spec: RunSpec, layer: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(layer_entries(spec, layer))


def version_of(spec: RunSpec, layer: int, path: Path) -> int:
    """The version in a layer's file, of which nothing but the head is read. Raises `UserError` as
    `LayerState.from_bytes` does, and OSError."""
    with path.open("rb") as file:
        head = file.read(STATE_HEADER_LIMIT_BYTES)
    shapes, size_bytes = _shapes(spec, layer), path.stat().st_size
    return _check_header(memoryview(head), size_bytes, spec.digest(), layer, shapes, str(path))


def _mapped(path: Path) -> numpy.ndarray:
    """A file's bytes, as a copy on write. Nothing can be mapped of an empty one."""
    if path.stat().st_size == 0:
        return numpy.empty(0, dtype="u1")
    return numpy.memmap(path, dtype="u1", mode="c")


@lru_cache(maxsize=256)
def state_bytes_limit(spec: RunSpec, layer: int) -> int:
    """No valid `LayerState.to_bytes` of this layer is longer."""
    return STATE_HEADER_LIMIT_BYTES + 3 * 4 * parameter_count(build_layer(spec, layer, "meta"))


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@lru_cache(maxsize=64)
def _header(
    run_digest: str,
    layer: int,
    version: int,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
) -> bytes:
    """The head of the file; equal states have equal bytes."""
    metadata = {"format": "pt", "layer": str(layer), "run": run_digest, "version": str(version)}
    head = header(state_entries(shapes), metadata)
    assert len(head) <= STATE_HEADER_LIMIT_BYTES
    return head


def _file_of(head: bytes, parts: Sequence[Tensor]) -> memoryview:
    """The file of these parts. `bytes.join` would hold up all other threads while it copies: for a
    layer of gigabytes, an event loop for seconds. Parts from a device come straight to their
    place."""
    assert len(head) % 4 == 0, "numbers begin where the host may read them"
    whole = torch.empty(len(head) + sum(part.nbytes for part in parts), dtype=torch.uint8)
    whole[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    start = len(head)
    for part in parts:
        whole[start : start + part.nbytes].view(torch.float32).copy_(part.detach())
        start += part.nbytes
    return whole.numpy().data.toreadonly()


_VERSION = re.compile(rb'"version":"(0|[1-9][0-9]{0,11})"')


def _check_header(
    view: memoryview,
    size_bytes: int,
    run_digest: str,
    layer: int,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    path: str | None,
) -> int:
    """The version, if the header is exactly the one that `to_bytes` writes for it. `view` is of
    the file's beginning, `size_bytes` of all of it."""
    head = bytes(view[:STATE_HEADER_LIMIT_BYTES])
    found = _VERSION.search(head)
    version = int(found[1]) if found else 0
    expected = _header(run_digest, layer, version, shapes)
    expected_bytes = len(expected) + sum(map(entry_bytes, state_entries(shapes)))
    if size_bytes == expected_bytes and head[: len(expected)] == expected:
        return version
    if not found or size_bytes < _LENGTH_BYTES:
        cause = "it does not start with a layer's header"
    elif head[: len(expected)] != expected:
        cause = "its run, layer, names, shapes or dtypes are not the expected ones"
    else:
        cause = f"it has {size_bytes} bytes instead of {expected_bytes}"
    if path is None:
        raise PeerFault(f"state of layer {layer} that cannot be used: {cause}")
    raise UserError(
        f"{path} is not the state of layer {layer} of this run: {cause}",
        (f"delete {path} and use an older checkpoint", "copy the file again from its origin"),
    )
