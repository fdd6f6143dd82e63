"""What somebody must see to on this machine, from when it begins until it is over."""

TROUBLES_LIMIT = 16


class Troubles:
    """Each has a name of its own, so that whoever told of it can say that it is over."""

    def __init__(self) -> None:
        self._present: dict[str, tuple[str, str]] = {}

    def tell(self, name: str, what: str, fix: str) -> None:
        """One sentence each: what is wrong, and what to do."""
        assert name in self._present or len(self._present) < TROUBLES_LIMIT, name
        self._present[name] = (what, fix)

    def over(self, name: str) -> None:
        self._present.pop(name, None)

    def present(self) -> tuple[tuple[str, str], ...]:
        """(what, fix), oldest first."""
        return tuple(self._present.values())
