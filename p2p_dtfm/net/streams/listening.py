"""How long a lane has listened for the rest of a frame that is half here.

A sender's time runs only while it could send. It stands still while this peer keeps its streams
waiting. A stream in the middle of a frame, or of a part of one, has a time of its own
(`frames.patience_s`).
"""

import contextlib
from collections.abc import Iterator

from p2p_dtfm.ports import now


class Listening:
    """The listening of all streams of one lane together."""

    def __init__(self) -> None:
        self._kept_waiting = 0
        self._inside = 0
        self._listened_s = 0.0
        self._since_s = now.monotonic_s()
        self._moved_s = 0.0

    @property
    def so_far_s(self) -> float:
        """How long the lane has listened in all. Two readings are compared with each other."""
        going_on_s = 0.0 if self._kept_waiting else now.monotonic_s() - self._since_s
        return self._listened_s + going_on_s

    @property
    def silent_s(self) -> float:
        """For how long nothing has been on its way; 0 while something is, or waits to be taken."""
        return 0.0 if self._inside or self._kept_waiting else self.so_far_s - self._moved_s

    def moved(self) -> None:
        """Note that something has come."""
        self._moved_s = self.so_far_s

    @contextlib.contextmanager
    def kept_waiting(self) -> Iterator[None]:
        """Stop the time while this peer keeps the lane waiting, for room or for whoever takes what
        came. More may lie behind it."""
        if not self._kept_waiting:
            self._listened_s = self.so_far_s
        self._kept_waiting += 1
        try:
            yield
        finally:
            self._kept_waiting -= 1
            self._since_s = now.monotonic_s()
            self.moved()

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Mark a stream as being in the middle of a frame, or of a part."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self.moved()
