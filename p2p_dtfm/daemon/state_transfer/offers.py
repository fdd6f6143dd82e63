"""States of layers on offer, by digest: files, or in memory while the disk takes none."""

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.ports import rarely
from p2p_dtfm.train.data import BlobStore

MEMORY_LIMIT_BYTES = 256 << 20
"""The size of all states in memory together, unless one alone is larger."""

log = logging.getLogger("p2p_dtfm.donor")


class Offers:
    """What lies in `directory` is for others to fetch; whoever put it there removes it."""

    def __init__(self, directory: Path, memory_limit_bytes: int = MEMORY_LIMIT_BYTES) -> None:
        self._store = BlobStore(directory)
        self._memory_limit_bytes = memory_limit_bytes
        self._in_memory: dict[str, bytes | memoryview] = {}
        self._of_ends: set[str] = set()

    def put(
        self,
        payload: bytes | memoryview,
        of_end: bool = False,
        wrote: Callable[[], None] = lambda: None,
    ) -> str:
        """Returns the digest. `of_end`: whether it is of the first layer or the last one, which a
        run may leave to some. `wrote` hears of each piece that is done.

        Raises `OSError` if the disk takes nothing, and there is much in memory.
        """
        notes = self._of_ends.add if of_end else lambda digest: None
        try:
            return self._store.put_bytes(payload, wrote, notes)
        except OSError as error:
            notes(digest := digest_bytes(payload))
            others = [len(other) for name, other in self._in_memory.items() if name != digest]
            if others and sum(others) + len(payload) > self._memory_limit_bytes:
                if digest not in self._in_memory and self._store.path(digest) is None:
                    self._of_ends.discard(digest)
                raise
            fix = "free space on that disk, or make it writable"
            log.warning("a state is offered from memory: %s; %s", error, fix)
            self._in_memory[digest] = payload
            return digest

    def is_of_ends(self, digest: str) -> bool:
        """Whether it is on offer as the state of the first layer, or of the last one."""
        return digest in self._of_ends

    def find(self, digest: str) -> Path | bytes | memoryview | None:
        """Raises `PeerFault` if `digest` is malformed."""
        if rarely.happens("offer gone"):
            return None
        return self._store.path(digest) or self._in_memory.get(digest)

    async def put_beside(
        self, payload: bytes | memoryview, of_end: bool, wrote: Callable[[], None]
    ) -> str:
        """As `put`, in a thread, which goes on if the caller is cancelled. Nobody would remove what
        it puts then, so it does that itself."""
        made, is_given_up = list[str](), threading.Event()

        def put() -> str:
            made.append(digest := self.put(payload, of_end, wrote))
            if is_given_up.is_set():
                self.remove(digest)
            return digest

        try:
            return await asyncio.to_thread(put)
        except asyncio.CancelledError:
            is_given_up.set()
            for digest in made:
                self.remove(digest)
            raise

    def remove(self, digest: str) -> None:
        """What the disk does not remove, as one that has become read-only, goes with the next
        start."""
        self._in_memory.pop(digest, None)
        try:
            self._store.remove(digest)
        except OSError as error:
            log.debug("a state that was on offer stays: %s", error)
        else:
            self._of_ends.discard(digest)
