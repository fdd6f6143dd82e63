"""Files of lines that may be compressed: `.gz`, and `.zst` where zstandard is installed."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports.packages import how_to_install
from p2p_dtfm.train.data.text_files import BYTE_ORDER_MARK

_WINDOW_LIMIT_BYTES = 1 << 27
"""The window that `zstd --ultra --long` makes; the library refuses a larger one."""
_FEED_BYTES = 4 << 10
"""Compressed bytes decoded at once: few, since a block of zeros grows thirty thousand times."""
_BLOCK_BYTES = 1 << 20
COMPRESSED = (".gz", ".zst")


def inner_name(path: Path) -> str:
    """The name, in lower case, without the ending that says how it is compressed."""
    name = path.name.lower()
    return name.removesuffix(path.suffix.lower()) if is_compressed(path) else name


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSED


class BoundedLines:
    """Lines of bounded length out of one file, decompressed as they are read."""

    def __init__(self, path: Path, raw: BinaryIO, text: BinaryIO, limit_bytes: int) -> None:
        self._path, self._raw, self._text = path, raw, text
        self._limit_bytes = limit_bytes
        self._plain = raw is text
        self._read_bytes = 0

    @property
    def read_bytes(self) -> int:
        """How far into the file on disk this is."""
        return self._read_bytes if self._plain else self._raw.tell()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Each line with its number, from 1. Of a line that is too long only the beginning is
        given, which is no whole row."""
        number = 0
        while line := self._text.readline(self._limit_bytes + 1):
            number += 1
            self._read_bytes += len(line)
            if len(line) > self._limit_bytes:
                self._read_past(line)
            yield number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line

    def _read_past(self, line: bytes) -> None:
        """Reads past the rest of a line that is too long."""
        while line and not line.endswith(b"\n"):
            line = self._text.readline(_BLOCK_BYTES)
            self._read_bytes += len(line)


@contextmanager
def open_lines(path: Path, limit_bytes: int) -> Iterator[BoundedLines]:
    """Raises `UserError` for a damaged or cut file, also while its lines are read, and OSError."""
    with open(path, "rb") as raw:
        if not is_compressed(path):
            yield BoundedLines(path, raw, raw, limit_bytes)
            return
        try:
            yield BoundedLines(path, raw, _decompressed(path, raw), limit_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile, _DamagedStream) as error:
            raise UserError(
                f"{path} is not a whole compressed file: {error}",
                "fetch or write it again, or leave it out",
            ) from error


class _DamagedStream(Exception):
    """The bytes are no zstd stream."""


def _decompressed(path: Path, raw: BinaryIO) -> BinaryIO:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    try:
        import zstandard
    except ImportError:
        raise UserError(
            f"reading {path} needs zstandard, which is not installed here",
            (
                f"install it: {how_to_install('zstandard')}",
                "or decompress it first: unzstd FILE",
            ),
        ) from None
    return io.BufferedReader(_Frames(raw, zstandard))


class _Frames(io.RawIOBase):
    """The content of zstd frames, one after another. (The library's own reader takes a file that
    was cut short for a whole one.)"""

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw, self._library = raw, zstandard
        self._frame: Any = None
        self._encoded = b""
        self._decoded = memoryview(b"")
        """Decoded bytes not read yet; a view, since few compressed bytes may have become very
        many."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._decoded:
            if not self._encoded:
                self._encoded = self._raw.read(_FEED_BYTES)
            if not self._encoded:
                if self._frame is not None:
                    raise _DamagedStream("its end is missing")
                return 0
            self._feed()
        part = self._decoded[: len(buffer)]
        buffer[: len(part)] = part
        self._decoded = self._decoded[len(part) :]
        return len(part)

    def _feed(self) -> None:
        if self._frame is None:
            whole = self._library.ZstdDecompressor(max_window_size=_WINDOW_LIMIT_BYTES)
            self._frame = whole.decompressobj()
        try:
            self._decoded = memoryview(self._frame.decompress(self._encoded))
        except self._library.ZstdError as error:
            raise _DamagedStream(str(error)) from error
        self._encoded = b""
        if self._frame.eof:
            self._encoded, self._frame = self._frame.unused_data, None
