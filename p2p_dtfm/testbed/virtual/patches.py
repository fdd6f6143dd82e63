"""Puts functions in the place of others, for a time."""

from typing import Any


class Patches:
    """Replaced attributes. `undo` puts all of them back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> Any:
        """Puts `value` in the place of the attribute, and returns what was there."""
        before = owner.__dict__[name]
        self._before.append((owner, name, before))
        setattr(owner, name, value)
        return before

    def nothing(self, owner: Any, name: str) -> None:
        """Replaces the function by one that does nothing."""
        self.put(owner, name, lambda *args, **options: None)

    def undo(self) -> None:
        while self._before:
            owner, name, before = self._before.pop()
            setattr(owner, name, before)
