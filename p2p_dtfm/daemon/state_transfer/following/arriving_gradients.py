"""Reduced gradients on their way to a follower of layers: chunk by chunk, step by step."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, Workload
from p2p_dtfm.core.schedule.pieces import CHUNK_ELEMENTS
from p2p_dtfm.net.streams.frames import FrameHeader
from p2p_dtfm.train.stage.finite import is_finite
from p2p_dtfm.train.stage.tensor_bytes import tensor_from_bytes

GRADIENTS_LIMIT_BYTES = 512 << 20
"""The room for steps that are not replayed yet; beyond it the follower begins again from a newer
state. Of large layers more may wait: always two steps, as at the donor (`queued_bytes_limit`)."""

Tensor = Any


@dataclass
class _Gradient:
    """A layer's reduced gradient of one step on its way here."""

    whole: Tensor
    """Flat fp32; where chunks are missing its values mean nothing."""
    missing: set[int]
    """Where the chunks that have not come begin."""

    def take(self, start: int, chunk: Tensor) -> None:
        """Take a chunk. The first that comes counts: whoever was told of the whole may be using
        it."""
        if start in self.missing:
            self.whole[start : start + len(chunk)] = chunk
            self.missing.discard(start)


class ArrivingGradients:
    """The gradients of some layers, by step, until they are replayed."""

    def __init__(self, workload: Workload, layers: Collection[int]) -> None:
        self._workload = workload
        step_bytes = sum(FLOAT_BYTES * workload.cost(n).parameter_count for n in layers)
        self._limit_bytes = max(GRADIENTS_LIMIT_BYTES, 2 * step_bytes)
        self._found: dict[tuple[int, int], _Gradient] = {}
        self._held_bytes = 0

    def require_possible(self, sender: str, header: FrameHeader) -> None:
        """Raises `PeerFault` for a frame that cannot be a chunk of a gradient."""
        length = self._workload.cost(header.layer).parameter_count
        start = header.index * CHUNK_ELEMENTS
        if start >= length or header.shape != (min(CHUNK_ELEMENTS, length - start),):
            raise PeerFault(f"gradient chunk {header.index} of shape {header.shape}", sender)
        if (header.codec, header.dtype) != ("fp32", "float32"):
            raise PeerFault(f"a gradient of {header.dtype} in {header.codec}", sender)

    def take(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """Take a chunk that is possible. Raises `PeerFault` for values that are no numbers."""
        chunk, key = tensor_from_bytes(payload, header.shape), (header.layer, header.step)
        if not is_finite(chunk):
            raise PeerFault(f"a gradient of layer {header.layer} that is not finite", sender)
        if key not in self._found:
            length = self._workload.cost(header.layer).parameter_count
            starts = set(range(0, length, CHUNK_ELEMENTS))
            self._found[key] = _Gradient(chunk.new_empty(length), starts)
            self._held_bytes += self._found[key].whole.nbytes
        self._found[key].take(header.index * CHUNK_ELEMENTS, chunk)

    @property
    def are_too_many(self) -> bool:
        return self._held_bytes > self._limit_bytes

    def whole(self, layer: int, step: int) -> Tensor | None:
        """The whole gradient, flat fp32; None while a part of it is missing."""
        gradient = self._found.get((layer, step))
        return None if gradient is None or gradient.missing else gradient.whole

    def has_later(self, layer: int, step: int) -> bool:
        """Whether anything of a later step of this layer is here."""
        return any(of == layer and later > step for of, later in self._found)

    def replayed(self, layer: int, step: int) -> None:
        """This gradient is not needed any more, nor are those before it."""
        for old in [key for key in self._found if key[0] == layer and key[1] <= step]:
            self._held_bytes -= self._found.pop(old).whole.nbytes

    def largest_of(self, donor_of: Mapping[int, str]) -> str:
        """The donor whose gradients take most room; `donor_of` is by layer."""
        held_bytes: Counter[str] = Counter()
        for (layer, _), gradient in self._found.items():
            held_bytes[donor_of[layer]] += gradient.whole.nbytes
        return held_bytes.most_common(1)[0][0]

    def drop(self, layers: Collection[int]) -> None:
        """Drop all gradients of these layers."""
        for key in [key for key in self._found if key[0] in layers]:
            self._held_bytes -= self._found.pop(key).whole.nbytes
