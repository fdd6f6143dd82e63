"""A swarm on this machine that is told to end, by whatever: its daemons are ended, and what nobody
keeps is removed."""

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def as_by_ctrl_c() -> Iterator[None]:
    """Have SIGTERM, and a terminal that is closed, end this as Ctrl-C does. Else Python would clean
    up nothing. Under nohup a closed terminal ends nothing. Shell and kernel may both say that one
    was closed: the second word would cut short what the first one began."""

    def end(number: int, frame: FrameType | None) -> None:
        for kind in kinds:
            signal.signal(kind, signal.SIG_IGN)
        raise KeyboardInterrupt

    kinds = [it for it in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(it) != signal.SIG_IGN]
    with handled(kinds, end):
        yield


@contextmanager
def handled(
    kinds: Collection[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """In this context `handler` deals with these signals."""
    before = {kind: signal.signal(kind, handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, back in before.items():
            signal.signal(kind, back)
