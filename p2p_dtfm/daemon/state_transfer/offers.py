"""States of layers on offer, by digest: files, or in memory while the disk takes none."""

import logging
from pathlib import Path

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.train.data import BlobStore

MEMORY_LIMIT_BYTES = 256 << 20
"""Together, unless one state alone is larger."""

log = logging.getLogger("p2p_dtfm.donor")


class Offers:
    """What lies in `directory` is for others to fetch; whoever put it there removes it."""

    def __init__(self, directory: Path, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._store = BlobStore(directory)
        self._memory_limit_bytes = memory_limit_bytes
        self._in_memory: dict[str, bytes] = {}

    def put(self, payload: bytes) -> str:
        """The digest. Raises `OSError` if the disk takes nothing, and there is much in memory."""
        try:
            return self._store.put_bytes(payload)
        except OSError as error:
            digest = digest_bytes(payload)
            others = [len(other) for name, other in self._in_memory.items() if name != digest]
            if others and sum(others) + len(payload) > self._memory_limit_bytes:
                raise
            log.warning("a state is offered from memory: %s; free space on that disk", error)
            self._in_memory[digest] = payload
            return digest

    def find(self, digest: str) -> Path | bytes | None:
        """Raises `PeerFault` if `digest` is malformed."""
        return self._store.path(digest) or self._in_memory.get(digest)

    def remove(self, digest: str) -> None:
        self._in_memory.pop(digest, None)
        self._store.remove(digest)
