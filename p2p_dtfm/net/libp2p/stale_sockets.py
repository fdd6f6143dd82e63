"""Sockets that dead processes left behind: hivemind's names are random, so they would pile up."""

import itertools
import os
import socket
import time
from pathlib import Path

_FOLDER = Path("/tmp")  # hivemind's own choice, whatever TMPDIR says
_PATTERN = "hivemind-p2p*-*.sock"
_AT_MOST = 4096
_MINIMUM_AGE_S = 60


def remove_stale_sockets() -> int:
    """Remove sockets of ours to which provably nobody is bound; returns how many."""
    try:
        bound = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    except OSError:
        return 0  # without the kernel's list nothing is provable
    removed = 0
    for path in itertools.islice(_FOLDER.glob(_PATTERN), _AT_MOST):
        try:
            if str(path) not in bound and _is_old_and_ours(path) and _refuses(path):
                path.unlink()
                removed += 1
        except OSError:
            continue  # somebody else was faster
    return removed


def _is_old_and_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > _MINIMUM_AGE_S


def _refuses(path: Path) -> bool:
    """The kernel's list covers this network namespace; a refused connection covers the others."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
