"""The corpus that needs no download: the source text of the Python standard library.

Versions of Python differ, so machines do too; peers therefore fetch the founder's shards by hash.
"""

import os
import platform
import sysconfig
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.first_reading import Progress
from p2p_dtfm.train.data.manifest import Manifest
from p2p_dtfm.train.data.prepare import prepare

STANDARD_LIBRARY = "python-standard-library"
LIMIT_BYTES = 12_000_000
"""Most bytes of the corpus. Some installations carry more text, which would only take longer."""

_LEFT_OUT_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__",  # not the standard library
    "test", "tests", "idle_test",  # repetitive
    "encodings", "lib2to3",  # tables, and a second grammar of the same language
}  # fmt: skip
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")
"""Modules with these beginnings are written by whoever set the machine up, with its paths."""


def standard_library_paths() -> list[Path]:
    """Source files, sorted by their path within the library. Raises `UserError` if there are none.

    Symbolic links lead out of the library and are left out.
    """
    top = Path(sysconfig.get_path("stdlib"))
    found: list[tuple[str, int]] = []
    for folder, subfolders, names in os.walk(top):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if not name.endswith(".py") or name.startswith(_LEFT_OUT_PREFIXES):
                continue
            if path.is_symlink() or not os.access(path, os.R_OK):
                continue
            found.append((path.relative_to(top).as_posix(), path.stat().st_size))
    chosen, total_bytes = [], 0
    for relative, size_bytes in sorted(found):
        if total_bytes + size_bytes <= LIMIT_BYTES:
            chosen.append(top / relative)
            total_bytes += size_bytes
    if not chosen:
        raise UserError(
            f"no source text of the Python standard library in {top}",
            "prepare text of your own: p2p-dtfm prepare PATH... --out DIR",
        )
    return chosen


def prepare_standard_library(
    out: Path, *, progress: Progress = lambda done_bytes, total_bytes, stage: None
) -> Manifest:
    """Make the default corpus in `out`, as bytes. Raises `UserError`."""
    return prepare(
        standard_library_paths(),
        out,
        progress=progress,
        name=STANDARD_LIBRARY,
        licence="PSF-2.0",
        source=f"standard library of Python {platform.python_version()}",
    )
