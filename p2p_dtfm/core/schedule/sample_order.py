"""Which samples a microbatch holds: a seeded permutation of the samples for each pass over them.

Any peer computes the samples of any microbatch from the run spec alone, without state and without
asking. The permutation is a Feistel network over pairs of digits in base a, where a is the least
integer with a * a >= sample_count. So at most 2 * sqrt(sample_count) values lie outside, and are
walked over (cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
2002). The keys come from BLAKE2b. The round function is the finalizer of splitmix64 (Steele, Lea
and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). It uses integers only,
and so is equal on every machine.
"""

import hashlib
import math
from functools import lru_cache

_ROUNDS = 8
_MASK = (1 << 64) - 1
_NUMBER_LIMIT = 1 << 64


def sample_index(seed: int, pass_number: int, position: int, sample_count: int) -> int:
    """The sample at `position` (0 <= position < sample_count) of a pass.

    For a fixed seed and pass this is a bijection of range(sample_count).
    """
    assert 0 <= position < sample_count <= _NUMBER_LIMIT, (position, sample_count)
    base = math.isqrt(sample_count - 1) + 1
    keys = _round_keys(seed, pass_number)
    value = _permute(position, base, keys)
    while value >= sample_count:
        value = _permute(value, base, keys)
    return value


def sample_indices_of(
    seed: int,
    step: int,
    microbatch: int,
    microbatch_size: int,
    global_batch: int,
    sample_count: int,
) -> tuple[int, ...]:
    """The samples of one microbatch, in order.

    Steps and microbatches count from 0. Positions run on from step to step, so a batch may straddle
    two passes and every sample is used exactly once a pass.
    """
    assert step >= 0 and sample_count > 0 and microbatch_size > 0
    assert microbatch >= 0 and (microbatch + 1) * microbatch_size <= global_batch
    first = step * global_batch + microbatch * microbatch_size
    return tuple(
        sample_index(seed, position // sample_count, position % sample_count, sample_count)
        for position in range(first, first + microbatch_size)
    )


def _permute(value: int, base: int, keys: tuple[int, ...]) -> int:
    """One pass through the network: a bijection of range(base * base)."""
    left, right = divmod(value, base)
    for key in keys:
        left, right = right, (left + _mix(right ^ key)) % base
    return left * base + right


def _mix(value: int) -> int:
    """splitmix64's finalizer: a bijection of 64-bit integers in which every bit affects all."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=16)
def _round_keys(seed: int, pass_number: int) -> tuple[int, ...]:
    assert 0 <= seed < _NUMBER_LIMIT and 0 <= pass_number < _NUMBER_LIMIT
    material = hashlib.blake2b(
        seed.to_bytes(8, "little") + pass_number.to_bytes(8, "little"),
        digest_size=8 * _ROUNDS,
        person=b"sample-order",
    ).digest()
    return tuple(
        int.from_bytes(material[offset : offset + 8], "little")
        for offset in range(0, 8 * _ROUNDS, 8)
    )
