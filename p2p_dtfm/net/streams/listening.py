"""How long a lane has listened for the rest of what is half here.

A sender's time runs only while it could send: not while this peer keeps its stream waiting, and a
stream in the middle of a frame, or of a part of one, has a time of its own (`frames.patience_s`).
"""

import contextlib
from collections.abc import Iterator

from p2p_dtfm.ports import now


class Listening:
    """Of all streams of one lane together."""

    def __init__(self) -> None:
        self._kept_waiting = 0
        self._inside = 0
        self._listened_s = 0.0
        self._since_s = now.monotonic_s()
        self._moved_s = 0.0

    @property
    def so_far_s(self) -> float:
        """For how long, in all; to compare with each other."""
        going_on_s = 0.0 if self._kept_waiting else now.monotonic_s() - self._since_s
        return self._listened_s + going_on_s

    @property
    def silent_s(self) -> float:
        """For how long nothing has been on its way; 0 while something is, or waits to be taken."""
        return 0.0 if self._inside or self._kept_waiting else self.so_far_s - self._moved_s

    def moved(self) -> None:
        """Something has come."""
        self._moved_s = self.so_far_s

    @contextlib.contextmanager
    def kept_waiting(self) -> Iterator[None]:
        """By this peer, for room or for who takes what came: more may lie behind it."""
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
        """A stream is in the middle of a frame, or of a part."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self.moved()
