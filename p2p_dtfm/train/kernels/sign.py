"""One bit for each element; its twin is `codecs.sign`."""

import torch
from torch import Tensor

from p2p_dtfm.train.kernels.launcher import Launcher, blocks_for, over_elements

_BLOCK = 512
_VERSION_BYTES = 4


def encode(launcher: Launcher, values: Tensor, version: int) -> Tensor:
    """The payload of flat fp32, uint8."""
    count = values.numel()
    means_end = _VERSION_BYTES + 2 * -(-count // _BLOCK)
    payload = torch.empty(means_end + -(-count // 8), dtype=torch.uint8, device=values.device)
    payload[:_VERSION_BYTES].view(torch.int32).fill_(version)
    if count:
        means, signs = payload[_VERSION_BYTES:means_end], payload[means_end:]
        scale_of_last = _BLOCK / (_BLOCK - -count % _BLOCK)
        blocks = blocks_for(count, _BLOCK)
        threads = _BLOCK // 2
        launcher.launch("sign_encode", blocks, threads, values, count, scale_of_last, means, signs)
    return payload


def decode(launcher: Launcher, body: Tensor, count: int) -> tuple[Tensor, bool]:
    """The values of a payload without its version, and whether a magnitude is negative."""
    means_end = 2 * -(-count // _BLOCK)
    values = torch.empty(count, device=body.device)
    fault = torch.zeros(1, dtype=torch.int32, device=body.device)
    means, signs = body[:means_end], body[means_end:]
    over_elements(launcher, "sign_decode", count, means, signs, count, values, fault)
    return values, bool(fault.item())
