"""Ctrl-C while a program loads, which takes half a minute on a busy machine; and signals to the
first process of a container."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_FIRST = 1
"""The number of a container's first process. The kernel drops each signal to it that has no
handler, so what ends any other process is a handler there."""


def heed_as_the_first() -> None:
    """Have SIGTERM end this process at once, if it is the first one of a container. A daemon that
    takes part has a handler of its own."""
    if os.getpid() == _FIRST:
        signal.signal(signal.SIGTERM, _end_at_once)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """In this context Ctrl-C ends the process at once: there is nothing to clean up yet. Otherwise
    Python would raise `KeyboardInterrupt` inside of what is loaded, and print pages about it; an
    event loop would go on waiting."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # a job in the background ignores it
        ends = _end_at_once if os.getpid() == _FIRST else signal.SIG_DFL
        signal.signal(signal.SIGINT, ends)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
