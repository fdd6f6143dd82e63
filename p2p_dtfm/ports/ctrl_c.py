"""Ctrl-C while a program loads, which takes half a minute on a machine that does much else."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_at_once() -> Iterator[None]:
    """There is nothing to leave in order yet. Python would raise `KeyboardInterrupt` inside of what
    is loaded, and print pages about it; an event loop would go on waiting for it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as of a job in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
