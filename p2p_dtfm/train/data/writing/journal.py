"""How far the writing of tokens has got, in a file beside them.

    OUT/.tmp-writing.json            bound to text, tokenizer and wishes by their digest
    OUT/blobs/.tmp-writing-SPLIT-N   the tokens of shard N, until it is full and the journal says so

A shard gets its name only after the journal says that it is full. So at whatever moment a process
ends, the newest journal names bytes that are there: whole shards, under their own or still under
the hidden name, and the beginning of an open shard. All are hashed before writing goes on.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.atomic_file import write_atomically
from p2p_dtfm.train.data.manifest import SHARD_LIMIT_TOKENS, ShardEntry, Split

JOURNAL_NAME = ".tmp-writing.json"
_FORMAT = 1
_LIMIT_BYTES = 64 << 20
_EVERY_S = 5.0
_EVERY_BYTES = 1 << 26
"""The journal is saved after so many bytes of text, or after `_EVERY_S`, whichever comes first."""
_LEAST_REST = 20
"""The least pause between two savings, in multiples of the time that the last one took: with very
many shards it takes long."""

Count = Annotated[int, Meta(ge=0, lt=1 << 60)]
_Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]


class OpenShard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The beginning of a shard that is not full."""

    number: Count
    tokens: Annotated[int, Meta(ge=1, le=SHARD_LIMIT_TOKENS)]
    digest: _Digest
    """Digest of these tokens; what lies behind them is written again."""


class SplitState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written of a split."""

    shards: Annotated[tuple[ShardEntry, ...], Meta(max_length=1 << 17)] = ()
    tokens: Count = 0
    open: OpenShard | None = None


class WrittenSoFar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of the first piece of text that is not written yet, and what is before it."""

    file: Count = 0
    """The file's number among those of the first reading."""
    piece: Count = 0
    """The piece's number in that file."""
    text_bytes: Count = 0
    open_split: Split | None = None
    """The split whose last document has not ended yet."""
    train: SplitState = SplitState()
    held_out: SplitState = SplitState()


class _Left(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the journal's file."""

    format: int
    bound_to: _Digest
    tokenizer: _Digest | None
    """Digest of a tokenizer that was learnt; it lies in the store."""
    place: WrittenSoFar


class Journal:
    """The journal of an output directory. `bound_to`: a digest of all that the result depends
    on."""

    def __init__(self, out: Path, bound_to: str, say: Callable[[str], None]) -> None:
        self._path = out / JOURNAL_NAME
        self._bound_to = bound_to
        self.say = say
        self._rest_until_s = time.monotonic() + _EVERY_S
        self._written_bytes = 0
        self.tokenizer: str | None = None
        self.place = WrittenSoFar()
        self.is_kept = False
        """Whether the file names what this process has written, or what it goes on from."""
        if self._path.exists():  # an earlier command was interrupted, whatever it was about
            self._read()

    def is_due(self, text_bytes: int) -> bool:
        """Whether it is time to `save`, after so much text."""
        if text_bytes - self._written_bytes >= _EVERY_BYTES:
            return True
        return text_bytes > self._written_bytes and time.monotonic() >= self._rest_until_s

    def save(self, place: WrittenSoFar, tokenizer: str | None = None) -> None:
        """From now on a process that is ended goes on from `place`. Raises OSError: then it would
        go on from the place before."""
        began_s = time.monotonic()
        self.tokenizer = tokenizer or self.tokenizer
        left = _Left(_FORMAT, self._bound_to, self.tokenizer, place)
        write_atomically(self._path, msgspec.json.encode(left))
        self.place, self.is_kept = place, True
        ended_s = time.monotonic()
        self._rest_until_s = ended_s + max(_EVERY_S, _LEAST_REST * (ended_s - began_s))
        self._written_bytes = place.text_bytes

    def begin_anew(self, reason: str) -> None:
        """Write anew, since files are not as the journal says."""
        self.say(f"what an interrupted command left is not used: {reason}; tokens are written anew")
        self.remove()

    def remove(self) -> None:
        """Remove the file: the result is there, or nothing can go on from it."""
        self._path.unlink(missing_ok=True)
        self.tokenizer, self.place, self.is_kept = None, WrittenSoFar(), False
        self._written_bytes = 0

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                left = msgspec.json.decode(file.read(_LIMIT_BYTES), type=_Left)
        except (OSError, ValueError, RecursionError) as error:
            return self.begin_anew(f"its journal cannot be read ({error})")
        if (left.format, left.bound_to) != (_FORMAT, self._bound_to):
            return self.begin_anew("it was of other text, another tokenizer or other options")
        self.tokenizer, self.place, self.is_kept = left.tokenizer, left.place, True
        self._written_bytes = left.place.text_bytes


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Within it, no other process writes tokens there. Raises `UserError` and OSError."""
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another process is preparing data in {out}",
                "wait for it, or choose another --out directory",
            ) from error
        except OSError:
            pass  # a filesystem without locks
        yield
    finally:
        with suppress(OSError):
            os.close(descriptor)
