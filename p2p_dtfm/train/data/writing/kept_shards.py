"""Shards that get their names once a journal tells of them, and an open one to continue."""

import hashlib
import os
from pathlib import Path

from p2p_dtfm.train.data.blob_store import BlobStore, file_digest
from p2p_dtfm.train.data.manifest import ShardEntry, Split, TokenType
from p2p_dtfm.train.data.shard_files import ShardWriter
from p2p_dtfm.train.data.writing.journal import OpenShard, SplitState

_CHUNK_BYTES = 1 << 20


class NotAsLeft(Exception):
    """A file is not what the journal says it is."""


class KeptShardWriter(ShardWriter):
    """A `ShardWriter` whose `state` a journal can save. Full shards get their names by `settle`."""

    def __init__(
        self, store: BlobStore, split: Split, token_type: TokenType, shard_tokens: int
    ) -> None:
        super().__init__(store, split, token_type, shard_tokens)
        self._full: list[tuple[Path, str]] = []

    @property
    def unnamed(self) -> int:
        """How many full shards wait for their names."""
        return len(self._full)

    def state(self) -> SplitState:
        """What is on the disk, after forcing it there. Raises OSError."""
        for temporary, _ in self._full:
            _force_to_disk(temporary)
        shard = None
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            shard = OpenShard(len(self.entries), self._in_shard, self._hasher.hexdigest())
        return SplitState(tuple(self.entries), self.tokens, shard)

    def settle(self) -> None:
        """Give full shards their names, now that a journal tells of them."""
        for temporary, digest in self._full:
            temporary.replace(self._store.root / digest)
        self._full = []

    def take_up(self, state: SplitState) -> None:
        """Go on from `state`. Raises `NotAsLeft` and OSError."""
        for number, entry in enumerate(state.shards):
            self._require(number, entry)
        if state.open is not None:
            self._reopen(state.open)
        self.entries, self.tokens = list(state.shards), state.tokens
        within = self._in_shard if state.open is not None else 0
        if self.tokens != sum(entry.tokens for entry in self.entries) + within:
            raise NotAsLeft(f"the tokens of {self._split} are not the sum of their shards")

    def drop(self) -> None:
        """Use nothing of what was taken up."""
        self._full = []
        self.abandon()
        self.entries, self.tokens, self._in_shard = [], 0, 0

    def leave(self) -> None:
        """Leave all files as they are."""
        self._close_file()
        self._temporary, self._full = None, []

    def abandon(self) -> None:
        super().abandon()
        for temporary, _ in self._full:
            temporary.unlink(missing_ok=True)
        self._full = []

    @property
    def open_name(self) -> str | None:
        """The name of the file that is being written."""
        return None if self._temporary is None else self._temporary.name

    def _begin(self) -> Path:
        return self._hidden(len(self.entries))

    def _name(self, temporary: Path, digest: str) -> None:
        self._full.append((temporary, digest))

    def _hidden(self, number: int) -> Path:
        return self._store.root / f".tmp-writing-{self._split}-{number:06}"

    def _require(self, number: int, entry: ShardEntry) -> None:
        """Require that a full shard is there, or give it its name now. Raises `NotAsLeft`."""
        hidden, named = self._hidden(number), self._store.root / entry.digest
        size_bytes = entry.tokens * self._dtype.itemsize
        for path in (named, hidden):
            is_whole = path.is_file() and path.stat().st_size == size_bytes
            if is_whole and file_digest(path) == entry.digest:
                path.replace(named)
                return
        raise NotAsLeft(f"shard {entry.digest[:12]} of {self._split} is missing or damaged")

    def _reopen(self, shard: OpenShard) -> None:
        path = self._hidden(shard.number)
        left_bytes = shard.tokens * self._dtype.itemsize
        if not path.is_file() or path.stat().st_size < left_bytes:
            raise NotAsLeft(f"the open shard of {self._split} is missing or too short")
        self._temporary = path
        self._file = file = open(path, "r+b")  # noqa: SIM115 closed in _finish, abandon
        self._hasher = hashlib.blake2b(digest_size=32)
        while left_bytes and (chunk := file.read(min(_CHUNK_BYTES, left_bytes))):
            self._hasher.update(chunk)
            left_bytes -= len(chunk)
        if self._hasher.hexdigest() != shard.digest:
            raise NotAsLeft(f"the open shard of {self._split} is damaged")
        file.truncate()
        self._in_shard = shard.tokens


def _force_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
