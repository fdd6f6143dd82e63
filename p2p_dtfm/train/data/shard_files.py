"""Token shards: raw little-endian unsigned integers in files named by their hash."""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports import rarely
from p2p_dtfm.train.data.blob_store import BlobStore, file_digest
from p2p_dtfm.train.data.manifest import TOKEN_BYTES, ShardEntry, Split, TokenType

_DTYPES: dict[TokenType, np.dtype] = {
    "uint8": np.dtype("u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}
_CHECK_TOKENS = 1 << 20


class ShardDamaged(UserError):
    """The file of a shard does not hold that shard. Put it aside and fetch the shard again."""

    def __init__(self, digest: str, path: Path, problem: str) -> None:
        self.digest = digest
        super().__init__(
            f"data shard {path} {problem}",
            (
                f"delete {path}; it will be fetched again from the swarm",
                "if these data are your own, make them anew with p2p-dtfm prepare",
            ),
        )


class ShardUnreadable(UserError):
    """The shard's disk fails, or is away, for the moment. The shard may well be sound."""

    def __init__(self, digest: str, path: Path, problem: str) -> None:
        self.digest = digest
        super().__init__(
            f"data shard {path} cannot be read: {problem}",
            "see that its disk is there, and sound: dmesg tells its errors",
        )


class ShardWriter:
    """Writes the tokens of one split into shards of at most `shard_tokens`."""

    def __init__(
        self, store: BlobStore, split: Split, token_type: TokenType, shard_tokens: int
    ) -> None:
        self.entries: list[ShardEntry] = []
        self.tokens = 0
        self._store, self._split, self._dtype = store, split, _DTYPES[token_type]
        self._shard_tokens = shard_tokens
        self._in_shard = 0
        self._hasher = hashlib.blake2b(digest_size=32)
        self._file: BinaryIO | None = None
        self._temporary: Path | None = None

    def append(self, tokens: np.ndarray) -> None:
        """Add tokens [t], cutting a shard wherever one is full. OSError if the disk is full."""
        tokens = tokens.astype(self._dtype, copy=False)
        self.tokens += len(tokens)
        while len(tokens):
            taken = tokens[: self._shard_tokens - self._in_shard]
            tokens = tokens[len(taken) :]
            self._write(taken)
            if self._in_shard == self._shard_tokens:
                self._finish()

    def close(self) -> None:
        """Finish the last shard, which may be short."""
        if self._in_shard:
            self._finish()

    def abandon(self) -> None:
        """Remove a shard that is not finished."""
        self._close_file()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None

    def _write(self, tokens: np.ndarray) -> None:
        if self._file is None:
            self._temporary = self._begin()
            self._file = open(self._temporary, "wb")  # noqa: SIM115 closed in _finish, abandon
            self._hasher = hashlib.blake2b(digest_size=32)
        payload = tokens.tobytes()
        self._hasher.update(payload)
        self._file.write(payload)
        self._in_shard += len(tokens)

    def _finish(self) -> None:
        # Not synced: a shard torn by a power cut does not have its hash, which is checked
        # whenever one is opened.
        assert self._file is not None and self._temporary is not None
        self._file.close()
        digest = self._hasher.hexdigest()
        self._name(self._temporary, digest)
        self.entries.append(ShardEntry(digest, self._in_shard, self._split))
        self._file, self._temporary, self._in_shard = None, None, 0

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what it could not write is not wanted any more
                self._file.close()
            self._file = None

    def _begin(self) -> Path:
        """The path to which the next shard is written until it is full."""
        return self._store.temporary_path()

    def _name(self, temporary: Path, digest: str) -> None:
        temporary.replace(self._store.root / digest)


class ShardReader:
    """A file of tokens that is read as it is asked for. It is not mapped into memory: then a disk
    that fails, or a file that is cut, would end the process at once."""

    def __init__(self, descriptor: int, path: Path, entry: ShardEntry, dtype: np.dtype) -> None:
        self._descriptor, self._path = descriptor, path
        self._entry, self._dtype = entry, dtype

    def __del__(self) -> None:  # called only once no thread reads it any more
        os.close(self._descriptor)

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from `start` on, [count]. Raises `ShardDamaged` and `ShardUnreadable`."""
        offset, missing = start * self._dtype.itemsize, count * self._dtype.itemsize
        pieces = []
        while missing:
            try:
                rarely.fails("shard unreadable")
                piece = os.pread(self._descriptor, missing, offset)
            except OSError as error:
                raise _unreadable(self._entry, self._path, error) from error
            if not piece:
                raise ShardDamaged(self._entry.digest, self._path, "has been cut")
            pieces.append(piece)
            offset, missing = offset + len(piece), missing - len(piece)
        return np.frombuffer(b"".join(pieces), dtype=self._dtype)

    def require_within(self, vocabulary: int) -> None:
        """Raises `UserError` for a token outside the vocabulary, and what `read` raises."""
        if vocabulary > np.iinfo(self._dtype).max:
            return
        for start in range(0, self._entry.tokens, _CHECK_TOKENS):
            count = min(_CHECK_TOKENS, self._entry.tokens - start)
            highest = int(self.read(start, count).max())
            if highest >= vocabulary:
                raise UserError(
                    f"data shard {self._path} holds token {highest}, but its manifest declares a "
                    f"vocabulary of {vocabulary}",
                    "the data were made wrongly: run p2p-dtfm prepare again and found a new swarm",
                )


def open_shard(
    path: Path, entry: ShardEntry, token_type: TokenType, vocabulary: int, verified: bool
) -> ShardReader:
    """Open a shard.

    Its hash and the range of its tokens are checked unless they were before (`verified`).
    Raises `ShardDamaged`, `ShardUnreadable`, and `UserError` for a sound shard with tokens outside
    `vocabulary`.
    """
    expected_bytes = entry.tokens * TOKEN_BYTES[token_type]
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected_bytes:
            problem = f"has {size_bytes} bytes instead of {expected_bytes}"
            raise ShardDamaged(entry.digest, path, problem)
        if not verified and file_digest(path) != entry.digest:
            raise ShardDamaged(entry.digest, path, "is corrupt: its hash is not its name")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(entry, path, error) from error
    shard = ShardReader(descriptor, path, entry, _DTYPES[token_type])
    if not verified:
        shard.require_within(vocabulary)
    return shard


def _unreadable(entry: ShardEntry, path: Path, error: OSError) -> ShardUnreadable:
    return ShardUnreadable(entry.digest, path, error.strerror or str(error))
