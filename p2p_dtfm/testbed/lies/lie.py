"""What the environment tells a daemon that is to lie."""

from typing import Any

import msgspec

LIE_VARIABLE = "LIE_OF_A_DAEMON"
MEMORY_VARIABLE = "MEMORY_OF_A_DAEMON"
"""How many bytes of memory the daemon says it has."""
PACE_VARIABLE = "PACE_OF_A_DAEMON"
"""Whether the daemon takes as long as it says it takes."""


class Lie(msgspec.Struct, frozen=True):
    """One lie. `colluders` are the peers that lie together: each finds nothing wrong with the
    others' work."""

    kind: str
    from_step: int
    strength: float = 1.0
    colluders: tuple[str, ...] = ()

    def is_told(self, step: int) -> bool:
        return step >= self.from_step


def put(owner: Any, name: str, made: Any) -> None:
    """Puts `made` in the place of a class's or module's attribute of this name."""
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, made)
