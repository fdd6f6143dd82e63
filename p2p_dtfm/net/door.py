"""The door: all that arrives from other peers has to pass it before it is read."""

from collections.abc import Callable
from typing import Protocol

BUSY = "busy"
"""The refusal after which a correct peer tries again."""
Leave = Callable[[], None]


class Door(Protocol):
    """What a host asks before it serves a peer."""

    def enter(self, sender: str, kind: str, size_bytes: int) -> Leave | str:
        """What to call once the request is served, or why it is not served."""
        ...

    def spend(self, sender: str, kind: str, amount: int) -> None:
        """Charge the sender for what serving it has cost."""
        ...

    def blame(self, sender: str, kind: str) -> None:
        """Note that what the sender was let in with was wrong."""
        ...

    def is_near(self, sender: str) -> bool:
        """Whether tensors of a sender may come at all, now."""
        ...

    def goes_first(self, sender: str) -> bool:
        """Whether a sender's tensor comes in however much others have announced, as long as the
        sender has no other one under way."""
        ...


class OpenDoor:
    """For a host among friends: everything is let in."""

    def enter(self, sender: str, kind: str, size_bytes: int) -> Leave | str:
        return _nothing

    def spend(self, sender: str, kind: str, amount: int) -> None:
        return

    def blame(self, sender: str, kind: str) -> None:
        return

    def is_near(self, sender: str) -> bool:
        return True

    def goes_first(self, sender: str) -> bool:
        return True


def _nothing() -> None:
    return
