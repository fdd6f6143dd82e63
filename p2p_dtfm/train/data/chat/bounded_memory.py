"""So much memory more and no more, for what a stranger has this process do."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATISTICS = Path("/proc/self/statm")


@contextmanager
def bounded_memory(more_bytes: int) -> Iterator[None]:
    """Whoever asks for more than that within it gets a `MemoryError`. The whole process is bounded:
    other threads must not need much meanwhile. What it has, and has free, may be used besides.
    Where the system does not say how much the process has nothing is bounded."""
    try:
        pages = int(_STATISTICS.read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = pages * resource.getpagesize() + more_bytes
    if soft != resource.RLIM_INFINITY:
        bound = min(bound, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
