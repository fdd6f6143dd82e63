"""What a daemon is told that is to lie, in its environment."""

from typing import Any

import msgspec

LIE_VARIABLE = "LIE_OF_A_DAEMON"
MEMORY_VARIABLE = "MEMORY_OF_A_DAEMON"
"""Bytes that it says it has."""
PACE_VARIABLE = "PACE_OF_A_DAEMON"
"""Whether it takes the time that it says it takes."""


class Lie(msgspec.Struct, frozen=True):
    """`colluders` are the peers that lie together: each finds nothing wrong with the others'
    work."""

    kind: str
    from_step: int
    strength: float = 1.0
    colluders: tuple[str, ...] = ()

    def is_told(self, step: int) -> bool:
        return step >= self.from_step


def put(owner: Any, name: str, made: Any) -> None:
    """In place of what a class or a module has by this name."""
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, made)
