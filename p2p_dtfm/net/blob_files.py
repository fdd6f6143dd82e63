"""How blobs are read from a disk, and get there."""

import os
from pathlib import Path
from typing import BinaryIO

from p2p_dtfm.ports import rarely


def read_part(path: Path, offset: int, length: int) -> tuple[int, bytes]:
    """The size of the whole, and so much of it. Raises `OSError`."""
    rarely.fails("part unreadable")
    with path.open("rb") as file:
        total = os.fstat(file.fileno()).st_size
        file.seek(offset)
        return total, file.read(length)


def settle(file: BinaryIO) -> None:
    """It outlives this machine's power."""
    file.flush()
    os.fsync(file.fileno())
