"""The codec for differences of local steps over the slowest links: one bit for each element.

Signs share one magnitude for many elements (Seide et al. 2014, "1-bit stochastic gradient
descent"). Like `sparse`, the codec is of use only to a sender that keeps what was lost and adds it
the next time (error feedback, `segment_reduction`).
"""

import torch
from torch import Tensor

from p2p_dtfm.train.codecs.codec import FIRST, VERSION_BYTES, Codec, Turn
from p2p_dtfm.train.codecs.packing import Buffer, join, pack, packed_bytes, unpack
from p2p_dtfm.train.kernels import choice
from p2p_dtfm.train.kernels import sign as kernel

BLOCK = 512
"""Elements that share a magnitude: 3% more bytes."""
_NOT_A_NUMBER = 0x7FC0
"""The one NaN of bf16 that travels; there are many."""


class Sign(Codec):
    """u32 version · bf16 mean magnitude of each block of `BLOCK` · a bit for each element: is it
    below zero.

    A block with a value that is not finite decodes to NaN.
    """

    name = "sign"

    def payload_bytes(self, count: int) -> int:
        return VERSION_BYTES + 2 * -(-count // BLOCK) + packed_bytes(count, 1)

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        assert values.dtype == torch.float32, values.dtype
        flat = values.detach().reshape(-1)
        launcher = choice.launcher_for(flat.device)
        if launcher:
            return join([kernel.encode(launcher, flat.contiguous(), self.version)])
        signs = pack((flat < 0).to(torch.uint8), 1)
        return join([self._version_tensor(flat.device), _means(flat), signs])

    def _decoded(self, payload: Tensor, count: int, turn: Turn) -> Tensor:
        body = self._without_version(payload)
        launcher = choice.launcher_for(payload.device)
        if launcher:
            values, is_negative = kernel.decode(launcher, body, count)
            if is_negative:
                raise self._fault("a negative magnitude")
            return values
        means_end = 2 * -(-count // BLOCK)
        means = body[:means_end].view(torch.bfloat16).to(torch.float32)
        if bool((means < 0).any()):
            raise self._fault("a negative magnitude")
        magnitudes = means.repeat_interleave(BLOCK)[:count]
        is_below = unpack(body[means_end:], 1, count).to(torch.bool)
        return torch.where(is_below, -magnitudes, magnitudes)


def _means(flat: Tensor) -> Tensor:
    """The mean magnitude of each block, bf16 [blocks]; added by halving, in one order anywhere."""
    missing = -flat.numel() % BLOCK
    # divided before they are added, so that no sum passes the largest number
    total = torch.nn.functional.pad(flat.abs() * (1.0 / BLOCK), (0, missing)).view(-1, BLOCK)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    means = total.view(-1)
    if missing:
        means[-1:] *= BLOCK / (BLOCK - missing)
    largest = torch.finfo(torch.bfloat16).max
    found = means.clamp(max=largest).to(torch.bfloat16).view(torch.int16)
    # conversions of NaN differ between processors, and even within one
    return torch.where(means.isfinite(), found, _NOT_A_NUMBER).view(torch.bfloat16)
