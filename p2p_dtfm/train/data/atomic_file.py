"""A file that is either there in full or not there at all."""

import errno
import os
import re
import secrets
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"
_TEMPORARY = re.compile(re.escape(TEMPORARY_PREFIX) + "[0-9a-f]{32}")


def write_atomically(path: Path, payload: bytes) -> None:
    """Replace `path` by `payload`, durably: a reader sees the old bytes or the new. OSError."""
    temporary = temporary_path(path.parent)
    try:
        with open(temporary, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(folder: Path) -> Path:
    """A new empty file in `folder`, with a name that no finished file has."""
    path = folder / f"{TEMPORARY_PREFIX}{secrets.token_hex(16)}"
    path.touch(exist_ok=False)
    return path


def clear_temporary_files(folder: Path) -> None:
    """Remove what `write_atomically` left when its process was killed. Only while nobody writes
    there."""
    for left in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if _TEMPORARY.fullmatch(left.name):
            left.unlink(missing_ok=True)


def fix_of(error: OSError, directory: Path) -> str:
    """What to do when nothing can be written. Another directory on the same full disk does not
    help."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"free disk space where {directory} lies, or use a directory on another disk"
    return f"see that {directory} can be written to by this user, or use another directory"
