"""Something else for a time, in place of what is there."""

from typing import Any


class Patches:
    """All is as it was after `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> Any:
        """In place of what is returned."""
        before = owner.__dict__[name]
        self._before.append((owner, name, before))
        setattr(owner, name, value)
        return before

    def nothing(self, owner: Any, name: str) -> None:
        """A function that does nothing."""
        self.put(owner, name, lambda *args, **options: None)

    def undo(self) -> None:
        while self._before:
            owner, name, before = self._before.pop()
            setattr(owner, name, before)
