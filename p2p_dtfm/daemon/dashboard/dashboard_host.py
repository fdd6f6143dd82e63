"""The dashboard of this home: its port, its token, and how a browser gets both.

It stays while daemons come and go: an open page outlives a pause, and can end it.
"""

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from p2p_dtfm import __version__
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.telemetry.status import Status
from p2p_dtfm.ports import now
from p2p_dtfm.web.api import Action
from p2p_dtfm.web.dashboard import Dashboard
from p2p_dtfm.web.public_facts import PublicFacts, public_facts
from p2p_dtfm.web.public_server import PublicServer, public_listener
from p2p_dtfm.web.server import Server, loopback_listener
from p2p_dtfm.web.state import DashboardState, Live

TOKEN_BYTES = 24
log = logging.getLogger("p2p_dtfm")

PAGE = """<!doctype html>
<meta charset="utf-8"><meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={0}">
<title>p2p-dtfm</title><a href="{0}">the dashboard</a>
"""
"""A browser is given this file's name. An address on its command line could be read by every user
of the machine, and with it the token."""


class DashboardHost:
    """Serves on loopback from `start` until `close`; with port "off" it does nothing."""

    def __init__(self) -> None:
        self.address: str | None = None
        self._state: Callable[[], DashboardState] = partial(_nothing_yet, Status())
        self._actions: Mapping[str, Action] = {}
        self._token = ""
        self._page: Path | None = None
        self._dashboard: Dashboard | None = None
        self._server: Server | None = None
        self._public: PublicServer | None = None

    @property
    def watched(self) -> bool:
        """Whether a page is open."""
        return self._dashboard is not None and self._dashboard.watchers > 0

    def show(self, state: Callable[[], DashboardState], actions: Mapping[str, Action]) -> None:
        """From now on this is what to show, and these are the actions that may be asked for."""
        self._state = state
        self._actions = actions

    def state(self) -> DashboardState:
        """What is shown now."""
        return self._state()

    def public_facts(self) -> PublicFacts:
        """What anybody may know of that, if this daemon's user allows it."""
        return public_facts(self.state())

    async def start(
        self,
        port: int | str,
        home: Path,
        before: int | None = None,
        listener: int | None = None,
    ) -> None:
        """`port` is a number, "auto" or "off". A server that runs already stays as it is. `before`:
        with "auto", the port that open pages know, if it is still free. `listener`: a descriptor
        from `hand_over`.

        Raises `UserError` if the port is taken.
        """
        if port == "off" or self._server is not None:
            return
        self._token = stored_token(home / "dashboard.token")
        if listener is not None:
            listens = socket.socket(fileno=listener)
        else:
            listens = loopback_listener(None if port == "auto" else int(port), before)
        self._dashboard = Dashboard(self.state, lambda: self._actions, self._token)
        self._server = Server(self._dashboard.app, listens)
        await self._server.start()
        self.address = f"http://127.0.0.1:{listens.getsockname()[1]}/"
        page = PAGE.format(f"{self.address}#token={self._token}")
        self._page = _written(home / "dashboard.html", page)

    def check_ports(self, port: int | str, public_port: int) -> None:
        """Call it before anything is started. Raises `UserError` for a port that somebody else
        has."""
        if isinstance(port, int) and self._server is None:
            loopback_listener(port).close()
        if public_port and self._public is None:
            public_listener(public_port).close()

    async def start_public(self, port: int) -> None:
        """Start the page that anybody may read; with 0 there is none. Raises `UserError` if the
        port is taken."""
        if not port or self._public is not None:
            return
        self._public = PublicServer(self.public_facts, public_listener(port))
        await self._public.start()

    @property
    def port(self) -> int | None:
        """The port that it listens on."""
        return urlsplit(self.address).port if self.address else None

    def hand_over(self) -> int | None:
        """A descriptor for the program that takes this one's place: nobody else can take the port
        in between, and a page that asks then waits for its answer instead of being refused."""
        return self._server.duplicate() if self._server is not None else None

    def invitation(self) -> dict[str, str | None]:
        """For the user of this home alone: the address, and the one that may also act."""
        with_token = f"{self.address}#token={self._token}" if self.address else None
        page = str(self._page) if self._page else None
        return {"address": self.address, "address_with_token": with_token, "page": page}

    async def close(self) -> None:
        if self._public is not None:
            await self._public.close()
        if self._dashboard is not None and self._server is not None:
            self._dashboard.end_streams()
            await self._server.close()


def _nothing_yet(status: Status) -> DashboardState:
    """What is shown until there is a daemon."""
    now_s, since_s = round(now.wall_s(), 3), round(status.since_s, 3)
    return DashboardState(Live(now_s, __version__, "", status.state.value, status.reason, since_s))


def _written(page: Path, text: str) -> Path | None:
    """The page, once it is written; None where the disk does not take it. A daemon whose disk is
    full stays paused, and can be told to come back. Whoever looks for the page gets its address."""
    try:
        private_file(page, text)
    except UserError as error:
        log.warning("%s", error.cause)
        return None
    return page


def stored_token(path: Path) -> str:
    """The token of this home, made if there is none: open pages survive a daemon's restart."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        token = path.read_text(encoding="ascii").strip()
        if len(token) >= TOKEN_BYTES and path.stat().st_mode & 0o077 == 0:
            return token
    token = secrets.token_urlsafe(TOKEN_BYTES)
    private_file(path, token + "\n")
    return token


def private_file(path: Path, text: str) -> None:
    """Write a file anew, for this user alone to read. Raises `UserError`."""
    try:
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(text)
    except OSError as error:
        raise UserError(
            f"the dashboard's token cannot be written to {path}: {error.strerror}",
            "free space there, or: --dashboard off",
        ) from error
