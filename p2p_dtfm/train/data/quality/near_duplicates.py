"""How alike texts are, without comparing each with each: MinHash (Broder 1997). Needs datasketch.

Two texts share a *band* of their signatures with a chance that rises steeply around the wanted
similarity. Only texts that share one are compared.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports.packages import how_to_install

HASHES = 128
RUN_WORDS = 5
"""Texts are compared as sets of runs of so many words (as Penedo et al. 2024 did for FineWeb)."""


class TextSignatures:
    """Signatures and bands for one wanted similarity (Jaccard's). Raises `UserError`."""

    def __init__(self, similarity: float) -> None:
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError:
            raise UserError(
                "--deduplicate near needs datasketch, which is not installed here",
                (
                    f"install it: {how_to_install('datasketch')}",
                    "or leave out equal texts alone: --deduplicate exact",
                ),
            ) from None
        self.similarity = similarity
        self._min_hash = MinHash
        best = MinHashLSH(threshold=similarity, num_perm=HASHES)
        self._bands, self._rows = best.b, best.r

    def of(self, words: Sequence[str]) -> "np.ndarray":
        """The signature of a text's words, uint64 [HASHES]."""
        last = max(1, len(words) - RUN_WORDS + 1)
        runs = {" ".join(words[first : first + RUN_WORDS]) for first in range(last)}
        made = self._min_hash(num_perm=HASHES, seed=1)
        made.update_batch([run.encode("utf-8", "surrogatepass") for run in sorted(runs)])
        return np.asarray(made.hashvalues, dtype=np.uint64)

    def bands(self, signature: "np.ndarray") -> list[int]:
        """Keys of the bands, signed 64 bits each. Two texts with an equal key are candidates."""
        keys = []
        for band in range(self._bands):
            part = signature[band * self._rows : (band + 1) * self._rows].tobytes()
            salt = band.to_bytes(8, "little")
            digest = hashlib.blake2b(part, digest_size=8, salt=salt).digest()
            keys.append(int.from_bytes(digest, "little", signed=True))
        return keys

    def are_alike(self, one: "np.ndarray", other: "np.ndarray") -> bool:
        """Whether the share of equal hashes, which estimates the similarity, is high enough."""
        return float(np.mean(one == other)) >= self.similarity
