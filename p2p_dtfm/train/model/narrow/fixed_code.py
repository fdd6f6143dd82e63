"""The channels that no block writes. They say in signs which token this is and where it stands, and
every member can compute them.

Where blocks write to few channels of the stream (`model.written_width`), the others would be empty.
They hold this code instead, which never changes. So only the written channels travel between
stages, and each stage puts the code beside them again. What travels back is their whole gradient,
as no earlier layer reads the rest. (Ramasinghe et al. 2025, arXiv 2506.01260. There the written
channels are a subspace turned at random, and the code is drawn as the embedding is; here they are
the first channels.)

A number is written in digits of eight bits. For each place of a digit, each value has a row of
random signs. A number's row is the product of its digits' rows. Two rows are as far apart as if
each had been drawn, so few channels tell few numbers apart. Sums of two signs times a power of two
are exact anywhere.
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.model_spec import ModelSpec

STRENGTH = 0.25
"""The magnitude of each sign. A far larger one drowns what is written; with a far smaller one a
block hardly sees the code."""
_DIGIT_BITS = 8
_TABLES = 16
"""Tables that are kept, each for tokens or places, a digit, a count of channels and a device."""


def with_code(stream: Tensor, code: Tensor | None) -> Tensor:
    """The whole stream [sequences, tokens, width], made of its written channels and the code.
    Without a code the written channels are all."""
    return stream if code is None else torch.cat((stream, code), dim=2)


def fixed_code(model: ModelSpec, tokens: Tensor) -> Tensor:
    """The code, fp32 [sequences, tokens, code width], on the device of the tokens. These are int64
    [sequences, tokens]."""
    code = token_code(model, tokens)
    places = place_code(model, torch.arange(tokens.shape[1], device=tokens.device))
    return code if places is None else code + places


def token_code(model: ModelSpec, tokens: Tensor) -> Tensor:
    """The part of the code that says which tokens these are; one dimension more than theirs."""
    return _signs_of("token", tokens, model.vocabulary, model.code_width) * STRENGTH


def place_code(model: ModelSpec, places: Tensor) -> Tensor | None:
    """The part of the code that says where tokens stand; None if positions are rotary."""
    if model.position != "learned":
        return None
    return _signs_of("place", places, model.context, model.code_width) * STRENGTH


def _signs_of(what: str, numbers: Tensor, count: int, channels: int) -> Tensor:
    """The rows of signs of numbers, which are below `count`."""
    device, digits = str(numbers.device), max(1, -(-(count - 1).bit_length() // _DIGIT_BITS))
    last = (1 << _DIGIT_BITS) - 1
    signs = _table(what, 0, channels, device)[numbers & last]
    for digit in range(1, digits):
        place = (numbers >> _DIGIT_BITS * digit) & last
        signs = signs * _table(what, digit, channels, device)[place]
    return signs


@lru_cache(maxsize=_TABLES)
def _table(what: str, digit: int, channels: int, device: str) -> Tensor:
    """Signs, fp32 [values of a digit, channels]: bits of a hash, so the same on any machine."""
    values = 1 << _DIGIT_BITS
    material = f"p2p-dtfm fixed code\0{what}\0{digit}".encode()
    drawn = hashlib.shake_256(material).digest(-(-values * channels // 8))
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.frombuffer(bytearray(drawn), dtype=torch.uint8)
        bits = (whole[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        signs = bits.view(-1)[: values * channels].to(torch.float32) * 2.0 - 1.0
        return signs.view(values, channels).to(device)
