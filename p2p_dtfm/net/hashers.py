"""The hash functions by which blobs are named."""

import hashlib
from collections.abc import Callable
from typing import BinaryIO, Protocol


class Hasher(Protocol):
    def update(self, payload: bytes, /) -> object: ...

    def hexdigest(self) -> str: ...


NewHasher = Callable[[], Hasher]


def blake2b_of_blobs() -> Hasher:
    """The hash function of blobs that are named by their digest, unless said otherwise."""
    return hashlib.blake2b(digest_size=32)


def digest_of(file: BinaryIO, hasher: Hasher) -> str:
    """The hexadecimal digest of the rest of a file's content."""
    while piece := file.read(1 << 20):
        hasher.update(piece)
    return hasher.hexdigest()
