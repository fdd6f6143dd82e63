"""Whose fault it is: the user's, another peer's, or ours.

Our own mistakes are `AssertionError`s. We never catch them by name; where one must not end a
daemon, a last `except Exception` logs it as a bug. The user's and other peers' faults are
exceptions that carry their cause and, where somebody can act on it, the fix.
"""

from typing import Self

UNREACHABLE = 6
"""The exit code where nobody answers: the same command may work later, or elsewhere."""


class UserError(Exception):
    """Something a person gave us cannot be used. Shown without a traceback."""

    def __init__(self, cause: str, fixes: tuple[str, ...] | str = (), exit_code: int = 2) -> None:
        self.cause = cause
        self.fixes = (fixes,) if isinstance(fixes, str) else tuple(fixes)
        self.exit_code = exit_code
        super().__init__(self.render())

    def render(self) -> str:
        """The cause, then the numbered fixes."""
        lines = [self.cause]
        if len(self.fixes) == 1:
            lines.append(f"fix: {self.fixes[0]}")
        else:
            lines += [f"fix {number}: {fix}" for number, fix in enumerate(self.fixes, 1)]
        return "\n".join(lines)

    def to_keep(self) -> Self:
        """The same error without its traceback, which keeps alive all objects of its frames."""
        kept = type(self).__new__(type(self), *self.args)
        vars(kept).update(vars(self))
        return kept


class DeviceFault(UserError):
    """The device has failed, or has no memory left. In a while it may work again."""

    def __init__(self, cause: str, fixes: tuple[str, ...]) -> None:
        super().__init__(cause, fixes, exit_code=1)


class P2pdLost(UserError):
    """The p2pd process, through which a daemon speaks to others, has ended by itself. A new one
    does as well."""

    def __init__(self, cause: str, fixes: tuple[str, ...] | str) -> None:
        super().__init__(cause, fixes, exit_code=1)


class PeerFault(Exception):
    """Another peer sent what no correct peer sends. This costs that peer its connection."""

    def __init__(self, cause: str, peer_id: str = "") -> None:
        self.cause = cause
        self.peer_id = peer_id
        super().__init__(f"{peer_id or 'a peer'}: {cause}")
