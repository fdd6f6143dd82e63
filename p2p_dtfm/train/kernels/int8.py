"""A byte for each element; its twin is `codecs.dense.Int8`."""

import torch
from torch import Tensor

from p2p_dtfm.train.kernels.launcher import Launcher, blocks_for, over_elements

_BLOCK = 128
_VERSION_BYTES = 4


def encode(launcher: Launcher, values: Tensor, version: int) -> Tensor:
    """The payload of flat fp32, uint8."""
    count = values.numel()
    steps_end = _VERSION_BYTES + 4 * -(-count // _BLOCK)
    payload = torch.empty(steps_end + count, dtype=torch.uint8, device=values.device)
    payload[:_VERSION_BYTES].view(torch.int32).fill_(version)
    if count:
        steps, numbers = payload[_VERSION_BYTES:steps_end], payload[steps_end:]
        blocks = blocks_for(count, _BLOCK)
        launcher.launch("int8_encode", blocks, _BLOCK, values, count, steps, numbers)
    return payload


def decode(launcher: Launcher, body: Tensor, count: int) -> tuple[Tensor, bool]:
    """The values of a payload without its version, and whether one of its steps is negative."""
    steps_end = 4 * -(-count // _BLOCK)
    values = torch.empty(count, device=body.device)
    fault = torch.zeros(1, dtype=torch.int32, device=body.device)
    steps, numbers = body[:steps_end], body[steps_end:]
    over_elements(launcher, "int8_decode", count, steps, numbers, count, values, fault)
    return values, bool(fault.item())
