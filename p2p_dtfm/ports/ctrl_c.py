"""Ctrl-C while a program loads, which takes half a minute on a busy machine."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_at_once() -> Iterator[None]:
    """In this context Ctrl-C ends the process at once: there is nothing to clean up yet. Otherwise
    Python would raise `KeyboardInterrupt` inside of what is loaded, and print pages about it; an
    event loop would go on waiting."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a job in the background ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
