"""What a codec is: fp32 values to bytes and back, with some loss, in a known number of bytes."""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.train.codecs.packing import Buffer, as_tensor

VERSION_BYTES = 4
"""Little-endian u32 before payloads whose form is our own."""


class Turn(NamedTuple):
    """What sender and receiver know alike about a tensor, for codecs that use chance."""

    place: int = 0
    """Names the elements: run, layer and chunk or microbatch. 0 <= place < 2^64."""
    step: int = 0
    unbiased: bool = False
    """Whether the mean loss must be zero, as for gradients, rather than each loss small."""


FIRST = Turn()


class Codec:
    """`name` is what frames and run specs say; `version` changes whenever the bytes do.

    Any device may encode and decode; equal values give equal bytes on all of them.
    """

    name: str
    version: ClassVar[int] = 1
    lossless: ClassVar[bool] = False

    def payload_bytes(self, count: int) -> int:
        """The exact length of the payload of `count` elements."""
        raise NotImplementedError

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        """The payload of an fp32 tensor of any shape. It may share the tensor's memory, which must
        then stay unchanged until the bytes are sent."""
        raise NotImplementedError

    def decode(
        self,
        payload: Buffer,
        shape: tuple[int, ...],
        turn: Turn = FIRST,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The fp32 tensor of that shape. It may share the payload's memory.

        Raises `PeerFault` for bytes that `encode` does not write; nothing is allocated for them.
        """
        view, count = memoryview(payload).cast("B"), math.prod(shape)
        due = self.payload_bytes(count)
        if len(view) != due:
            raise PeerFault(
                f"{len(view)} bytes in {self.name} where {due} are due for {count} elements"
            )
        return self._decoded_as(as_tensor(view, device), shape, turn)

    def _decoded_as(self, payload: Tensor, shape: tuple[int, ...], turn: Turn) -> Tensor:
        """For a codec that goes by more than the number of elements. Raises `PeerFault`."""
        return self._decoded(payload, math.prod(shape), turn).view(shape)

    def _decoded(self, payload: Tensor, count: int, turn: Turn) -> Tensor:
        """`count` fp32 elements on the payload's device, from its flat uint8 of the right length.

        Raises `PeerFault`.
        """
        raise NotImplementedError

    def _fault(self, claim: str) -> PeerFault:
        return PeerFault(f"a payload in {self.name} with {claim}")

    def _version_tensor(self, device: torch.device) -> Tensor:
        return torch.tensor([self.version], dtype=torch.int32, device=device)

    def _without_version(self, payload: Tensor) -> Tensor:
        (found,) = payload[:VERSION_BYTES].view(torch.int32).tolist()
        if found != self.version:
            raise self._fault(f"version {found}; this peer speaks {self.version}")
        return payload[VERSION_BYTES:]
