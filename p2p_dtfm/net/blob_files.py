"""How blobs are read from a disk, and written so that they last."""

import os
from pathlib import Path
from typing import BinaryIO

from p2p_dtfm.ports import rarely


def read_part(path: Path, offset: int, length: int) -> tuple[int, bytes]:
    """The size of the whole file, and `length` bytes from `offset` on. Raises `OSError`."""
    rarely.fails("part unreadable")
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        file.seek(offset)
        return total, file.read(length)


def settle(file: BinaryIO) -> None:
    """Write the file to disk, so that it survives a power failure."""
    file.flush()
    os.fsync(file.fileno())
