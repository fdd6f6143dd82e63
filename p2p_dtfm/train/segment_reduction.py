"""One peer's part in reducing a segment, with any codec; the bytes travel elsewhere.

The flat gradient of a segment is cut into chunks, each owned by one holder. A holder encodes its
part of a chunk for the owner; the owner adds the decoded parts in pipeline order, in fp32, and
encodes the sum for all; everyone, the owner too, goes on with what the sum's bytes decode to. So
all holders end with the same bits, whatever a codec loses.

What it loses is not lost (error feedback: Seide et al. 2014, Karimireddy et al. 2019). A holder
owes what its encoded part lacks; an owner owes what the encoded sum lacks. Either is added to the
holder's own values in the next step: an owner's own part is never encoded, so adding to it is
adding to the sum. Therefore one number for each element is enough, and it stays right when another
holder becomes the owner.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.train.codecs import Buffer, Codec, Turn
from p2p_dtfm.train.reduction import sum_parts


def chunk_turn(spec: RunSpec, step: int, first_layer: int, start: int) -> Turn:
    """What all holders know alike of the chunk that begins at element `start` of a segment."""
    material = f"reduction\0{spec.seed}\0{first_layer}\0{start}".encode()
    digest = hashlib.blake2b(material, digest_size=8).digest()
    return Turn(int.from_bytes(digest, "little"), step)


class SegmentReduction:
    """One step's reduction of one segment at one holder.

    For a chunk of another owner: `part`, then `take_sum`. For an own chunk: `read_part` of all
    others, then `add_parts`. When every chunk is done, `reduced` is the same on all holders, and
    `owed` is what this holder owes if the step commits.
    """

    def __init__(
        self,
        spec: RunSpec,
        codec: Codec,
        step: int,
        first_layer: int,
        bounds: Sequence[tuple[int, int]],
        values: Tensor,
        owed: Tensor | None,
    ) -> None:
        """Take over `values`, this holder's flat fp32 gradient. `owed` is of the last committed
        step, in the same layout; None: nothing."""
        assert values.dim() == 1 and bounds[-1][1] == values.numel()
        self.reduced = values
        self.owed: Tensor | None = None
        self._codec = codec
        self._bounds = bounds
        self._turns = [chunk_turn(spec, step, first_layer, start) for start, _ in bounds]
        if owed is not None:
            values += owed
        if not codec.lossless:
            self.owed = torch.zeros_like(values)

    def elements(self, chunk: int) -> int:
        """How many a chunk has."""
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
        """The owner's sum of a chunk. Raises `PeerFault`."""
        self._of(self.reduced, chunk).copy_(self._decoded(chunk, payload))

    def read_part(self, chunk: int, payload: Buffer) -> Tensor:
        """Another holder's part of an own chunk. Raises `PeerFault`."""
        return self._decoded(chunk, payload)

    def add_parts(self, chunk: int, parts: Sequence[Tensor | None]) -> Buffer:
        """The sum of an own chunk, for all others. `parts` are in pipeline order, None is mine."""
        mine = self._of(self.reduced, chunk)
        total = sum_parts([mine if part is None else part for part in parts])
        payload, decoded = self._encoded(chunk, total)
        self._owe(chunk, total, decoded)
        mine.copy_(decoded)
        return payload

    def _of(self, flat: Tensor, chunk: int) -> Tensor:
        start, end = self._bounds[chunk]
        return flat[start:end]

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
            torch.sub(values, decoded, out=self._of(self.owed, chunk))
