"""One peer's part in reducing a segment, with any codec; the bytes travel elsewhere.

The flat gradient of a segment is cut into chunks, each owned by one holder. A holder encodes its
part of a chunk for the owner; the owner adds the decoded parts in pipeline order, in fp32, and
encodes the sum for all; everyone, the owner too, goes on with what the sum's bytes decode to. So
all holders end with the same bits, whatever a codec loses.

What a codec loses is made up for later (error feedback: Seide et al. 2014, Karimireddy et al.
2019). A holder owes what its encoded part lacks; an owner owes what the encoded sum lacks. Either
is added to the peer's own values in the next step. An owner's own part is never encoded, so adding
to it is adding to the sum. Therefore one number for each element is enough, and it stays right when
another holder becomes the owner.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.codecs import Buffer, Codec, Turn
from p2p_dtfm.train.kernels import choice, feedback
from p2p_dtfm.train.stage.finite import (
    PART_LIMIT,
    NotFinite,
    add_if_finite,
    copy_if_finite,
    is_finite,
    is_within,
)
from p2p_dtfm.train.updates.trimmed_sums import trimmed_sum


class PoisonedPart(Exception):
    """The part at this place in pipeline order has a value that is not finite."""

    def __init__(self, place: int) -> None:
        self.place = place
        super().__init__(
            "a part of gradients with a value that is not finite, or too large for one"
        )


def chunk_turn(spec: RunSpec, step: int, first_layer: int, start: int) -> Turn:
    """What all holders know alike of the chunk that begins at element `start` of a segment."""
    material = f"reduction\0{spec.seed}\0{first_layer}\0{start}".encode()
    digest = hashlib.blake2b(material, digest_size=8).digest()
    return Turn(int.from_bytes(digest, "little"), step)


@dataclass(frozen=True)
class SegmentCut:
    """How a segment's flat gradient is cut."""

    first_layer: int
    bounds: Sequence[tuple[int, int]]
    """First element and end of each chunk."""
    lengths: Sequence[int]
    """Elements of each layer."""
    trimmed: Sequence[int] = ()
    """The microbatches of each holder, in pipeline order, if sums are trimmed."""


class SegmentReduction:
    """One step's reduction of one segment at one holder.

    `fill` takes the layers' gradients, one by one and in any order; the gradients themselves stay
    as they are. A chunk is reduced once its layers are there. For a chunk of another owner, call
    `part`, then `take_sum`. For an own chunk, call `read_part` for all other holders' parts, then
    `add_parts`. When every chunk is done, `reduced` is the same on all holders, and `owed` is what
    this holder owes if the step commits.
    """

    def __init__(
        self,
        spec: RunSpec,
        codec: Codec,
        step: int,
        cut: SegmentCut,
        owed: Tensor | None,
        room: Tensor | None = None,
    ) -> None:
        """`owed` is what was owed after the last committed step, fp32 on the CPU, one layer after
        the other; None: nothing. `room` is used for `reduced`, whatever is in it: a copy into
        memory that was touched before costs half as much."""
        ends = list(accumulate(cut.lengths))
        assert cut.bounds[-1][1] == ends[-1]
        self.reduced = torch.empty(ends[-1]) if room is None else room
        assert self.reduced.shape == (ends[-1],)
        self.owed: Tensor | None = None if codec.lossless else torch.zeros(ends[-1])
        self._owed_before = owed
        self._codec = codec
        self._bounds = cut.bounds
        self._trimmed = cut.trimmed
        self._layers = {cut.first_layer + n: at for n, at in enumerate(pairwise([0, *ends]))}
        self._turns = [chunk_turn(spec, step, cut.first_layer, at) for at, _ in cut.bounds]

    def fill(self, layer: int, gradient: Tensor) -> None:
        """Take this holder's final gradient of a layer: flat fp32, any device. Raises
        `NotFinite`."""
        start, end = self._layers[layer]
        if not copy_if_finite(gradient, self.reduced[start:end]):
            raise NotFinite(f"the gradient of layer {layer} is not finite")
        if self._owed_before is not None:
            add_owed(self.reduced[start:end], self._owed_before[start:end])

    def layers_of(self, chunk: int) -> list[int]:
        """The layers that must be filled before a chunk can travel."""
        first, last = self._bounds[chunk]
        return [n for n, (start, end) in self._layers.items() if start < last and first < end]

    def reduced_layers(self) -> dict[int, Tensor]:
        """Views of `reduced`, by layer."""
        return {layer: self.reduced[start:end] for layer, (start, end) in self._layers.items()}

    @property
    def is_lossless(self) -> bool:
        """Whether the codec loses nothing. Then `part` and `read_part` compute nothing."""
        return self._codec.lossless

    @property
    def only_adds(self) -> bool:
        """Whether nothing is encoded, sorted or left out: sums take as long as memory does."""
        return self._codec.lossless and not self._trimmed

    def elements(self, chunk: int) -> int:
        """How many elements a chunk has."""
        start, end = self._bounds[chunk]
        return end - start

    def part(self, chunk: int) -> Buffer:
        """This holder's part of a chunk, for the owner.

        It may share memory that changes when the chunk's sum is taken.
        """
        payload, decoded = self._encoded(chunk, self._of(self.reduced, chunk))
        self._owe(chunk, self._of(self.reduced, chunk), decoded)
        return payload

    def take_sum(self, chunk: int, payload: Buffer) -> None:
        """Take the owner's sum of a chunk. Raises `PeerFault`."""
        values = self._decoded(chunk, payload)
        if not copy_if_finite(values, self._of(self.reduced, chunk)):
            raise PeerFault("a sum of gradients with a value that is not finite")

    def read_part(self, chunk: int, payload: Buffer) -> Tensor:
        """Another holder's part of an own chunk. Raises `PeerFault`."""
        return self._decoded(chunk, payload)

    def add_parts(self, chunk: int, parts: Sequence[Tensor | None]) -> Buffer:
        """The sum of an own chunk, for all others. `parts` are in pipeline order, None is mine.

        It is first + second + third and so on, unless it is a trimmed sum. Raises `PoisonedPart`
        and `NotFinite`; this holder's own part is then gone.
        """
        assert sum(part is None for part in parts) == 1, "a holder's own part is one of the parts"
        mine = self._of(self.reduced, chunk)
        # a value that is not finite makes every sum with it not finite
        if not self._add([mine if part is None else part for part in parts], mine):
            for place, part in enumerate(parts):
                if part is not None and not is_within(part, PART_LIMIT):
                    raise PoisonedPart(place)
            raise NotFinite("a sum of finite gradients is not finite")
        payload, decoded = self._encoded(chunk, mine)
        self._owe(chunk, mine, decoded)
        if decoded is not mine:
            mine.copy_(decoded)
        return payload

    def _of(self, flat: Tensor, chunk: int) -> Tensor:
        start, end = self._bounds[chunk]
        return flat[start:end]

    def _add(self, parts: Sequence[Tensor], total: Tensor) -> bool:
        if not self._trimmed:
            return add_if_finite(parts, total)
        # a value that is no number would be left out unseen
        return all(map(is_finite, parts)) and is_finite(trimmed_sum(parts, self._trimmed, total))

    def _encoded(self, chunk: int, values: Tensor) -> tuple[Buffer, Tensor]:
        payload = self._codec.encode(values, self._turns[chunk])
        if self._codec.lossless:
            return payload, values
        return payload, self._decoded(chunk, payload)

    def _decoded(self, chunk: int, payload: Buffer) -> Tensor:
        start, end = self._bounds[chunk]
        turn = self._turns[chunk]
        return self._codec.decode(payload, (end - start,), turn, self.reduced.device)

    def _owe(self, chunk: int, values: Tensor, decoded: Tensor) -> None:
        if self.owed is not None:
            owe(values, decoded, self._of(self.owed, chunk))


def add_owed(values: Tensor, owed: Tensor) -> None:
    """Add what is owed to the values, in place."""
    launcher = choice.launcher_for(values.device)
    if launcher:
        feedback.add(launcher, values, owed)
    else:
        values += owed


def owe(values: Tensor, decoded: Tensor, owed: Tensor) -> None:
    """Write into `owed` what the decoded values lack."""
    launcher = choice.launcher_for(values.device)
    if launcher:
        feedback.owe(launcher, values, decoded, owed)
    else:
        torch.sub(values, decoded, out=owed)
