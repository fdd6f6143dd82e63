"""Where everything that arrives from other peers has to pass, before it is read."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from p2p_dtfm.core.protocol.errors import PeerFault

BUSY = "busy"
"""The refusal after which a correct peer tries again."""
Leave = Callable[[], None]


class Door(Protocol):
    """What a host asks before it serves anybody."""

    def enter(self, sender: str, kind: str, size_bytes: int) -> Leave | str:
        """What to call once it is served, or why it is not."""
        ...


class OpenDoor:
    """For a host among friends: everything is let in."""

    def enter(self, sender: str, kind: str, size_bytes: int) -> Leave | str:
        return _nothing


def _nothing() -> None:
    return


@contextlib.contextmanager
def entered(door: Door, sender: str, kind: str, size_bytes: int) -> Iterator[None]:
    """Raises `PeerFault` with the reason where the door stays shut."""
    leave = door.enter(sender, kind, size_bytes)
    if isinstance(leave, str):
        raise PeerFault(leave, sender)
    try:
        yield
    finally:
        leave()
