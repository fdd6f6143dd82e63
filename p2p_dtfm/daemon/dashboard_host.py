"""The dashboard of this daemon: its port, its token, and how a browser gets both."""

import contextlib
import os
import secrets
from pathlib import Path

from p2p_dtfm.core.errors import UserError
from p2p_dtfm.daemon.observer import Observer
from p2p_dtfm.web.api import Action
from p2p_dtfm.web.dashboard import Dashboard
from p2p_dtfm.web.server import Server, loopback_listener

TOKEN_BYTES = 24


class DashboardHost:
    """Serves on loopback from `start` until `close`; with port "off" it does nothing."""

    def __init__(self, observer: Observer, actions: dict[str, Action]) -> None:
        self.address: str | None = None
        self._observer = observer
        self._actions = actions
        self._token = ""
        self._dashboard: Dashboard | None = None
        self._server: Server | None = None

    @property
    def watched(self) -> bool:
        """Whether a page is open."""
        return self._dashboard is not None and self._dashboard.watchers > 0

    async def start(self, port: int | str, home: Path) -> None:
        """`port` is a number, "auto" or "off". Raises `UserError` if it is taken."""
        if port == "off":
            return
        self._token = stored_token(home / "dashboard.token")
        listener = loopback_listener(None if port == "auto" else int(port))
        self._dashboard = Dashboard(self._observer.state, self._actions, self._token)
        self._server = Server(self._dashboard.app, listener)
        await self._server.start()
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}/"

    def invitation(self) -> dict[str, str | None]:
        """For the user of this home alone: the address, and the one that may also act."""
        with_token = f"{self.address}#token={self._token}" if self.address else None
        return {"address": self.address, "address_with_token": with_token}

    async def close(self) -> None:
        if self._dashboard is not None and self._server is not None:
            self._dashboard.end_streams()
            await self._server.close()


def stored_token(path: Path) -> str:
    """The token of this home, made if there is none: open pages survive a daemon's restart."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        token = path.read_text(encoding="ascii").strip()
        if len(token) >= TOKEN_BYTES and path.stat().st_mode & 0o077 == 0:
            return token
    token = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(token + "\n")
    except OSError as error:
        raise UserError(
            f"the dashboard's token cannot be written to {path}: {error.strerror}",
            "free space there, or: --dashboard off",
        ) from error
    return token
