"""Numbers below a base that is no power of two, in hardly more bits than they need."""

from functools import cache

import torch
from torch import Tensor

from p2p_dtfm.train.codecs.packing import pack, unpack


class Digits:
    """Several numbers below `base` as one number in that base, in as few bits as the largest needs.

    Sixteen numbers make one, or eight if the base is larger; eight of these fill whole bytes. To
    unpack, each is halved down to words of four or two numbers, which are looked up in a table.
    """

    def __init__(self, base: int) -> None:
        self._base = base
        self._word = 4 if base < 16 else 2
        """How many numbers are looked up together. So a table has 65,536 entries at most, and what
        is packed together fits into 63 bits."""
        self._each = 4 * self._word
        self._bits = int(base**self._each - 1).bit_length()
        assert self._bits < 64, base

    def packed_bytes(self, count: int) -> int:
        """Bytes of `count` numbers; `count` is a multiple of 128."""
        return count // self._each * self._bits // 8

    def pack(self, numbers: Tensor) -> Tensor:
        """Flat uint8 of flat int64, whose count is a multiple of 128; the first is the lowest
        digit."""
        wholes, base, each = numbers, self._base, 1
        while each < self._each:
            pairs = wholes.view(-1, 2)
            wholes, each = pairs[:, 1] * base**each + pairs[:, 0], 2 * each
        digit_bytes = wholes.view(torch.uint8).view(-1, 8)
        whole_bytes, rest_bits = divmod(self._bits, 8)
        head = digit_bytes[:, :whole_bytes].reshape(-1)
        if not rest_bits:
            return head
        places = torch.arange(rest_bits, dtype=torch.uint8, device=numbers.device)
        rest = (digit_bytes[:, whole_bytes, None] >> places) & 1
        return torch.cat([head, pack(rest.view(-1), 1)])

    def unpack(self, packed: Tensor, count: int) -> Tensor | None:
        """int64 [count]; None if `pack` cannot have written this."""
        wholes_count = count // self._each
        whole_bytes, rest_bits = divmod(self._bits, 8)
        digit_bytes = packed.new_zeros((wholes_count, 8))
        end = whole_bytes * wholes_count
        digit_bytes[:, :whole_bytes] = packed[:end].view(-1, whole_bytes)
        if rest_bits:
            bits = unpack(packed[end:], 1, wholes_count * rest_bits).view(-1, rest_bits)
            for place in range(rest_bits):
                digit_bytes[:, whole_bytes] |= bits[:, place] << place
        words, each = digit_bytes.view(torch.int64).view(-1), self._each
        while each > self._word:
            each //= 2
            higher = torch.div(words, self._base**each, rounding_mode="trunc")
            words = torch.stack([words - higher * self._base**each, higher], dim=1).view(-1)
        if count and int(words.max()) >= self._base**self._word:
            return None
        return _table(self._base, self._word, packed.device)[words].view(-1)


@cache
def _table(base: int, length: int, device: torch.device) -> Tensor:
    """int64 [base^length, length]: the digits of each word, the lowest first."""
    words = torch.arange(base**length, dtype=torch.int64, device=device)
    return torch.stack([words // base**place % base for place in range(length)], dim=1)
