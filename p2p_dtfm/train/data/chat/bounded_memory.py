"""A bound on the memory that this process takes for a stranger's program."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATISTICS = Path("/proc/self/statm")


@contextmanager
def bounded_memory(more_bytes: int) -> Iterator[None]:
    """Within it, asking for more than `more_bytes` beyond what the process has raises
    `MemoryError`. The bound holds for the whole process: other threads must not need much
    meanwhile. Memory that the process has and does not use may be used besides. Where the system
    does not tell the process's size, nothing is bounded."""
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
