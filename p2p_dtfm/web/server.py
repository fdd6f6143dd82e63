"""uvicorn within the daemon's own event loop, without its handling of signals."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterable

import uvicorn
from starlette.types import ASGIApp

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.web.bounded_connection import BoundedConnection

CLOSE_S = 2.0
FIRST_PORT = 31380
PORTS_TRIED = 20


class Server:
    """Serves an app on an open socket until closed."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",  # any web page can cause warnings, as often as it likes
            access_log=False,
            lifespan="off",
            http=BoundedConnection,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        self._listener = listener
        self._server = uvicorn.Server(config)
        # the daemon has its own way to end; uvicorn must not take its signals
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to serve. Returns when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve([self._listener]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        if self._task.done():
            await self._task

    def duplicate(self) -> int:
        """A descriptor that listens on after this server has closed. Its taker closes it."""
        return os.dup(self._listener.fileno())

    async def close(self) -> None:
        if self._task is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._task
        self._listener.close()


def loopback_listener(port: int | None, before: int | None = None) -> socket.socket:
    """A listener on 127.0.0.1: at `port`, or else at `before`, at the first free one of a small
    range, or at any.

    Raises `UserError` if the given port is taken.
    """
    wanted: Iterable[int] = (port,)if port is not None else (
        *((before,) if before else ()), *range(FIRST_PORT, FIRST_PORT + PORTS_TRIED), 0
    )  # fmt: skip
    for number in wanted:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Without this option a restarted daemon would lose its address to its own closed
            # connections.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", number))
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            if port is not None or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise UserError(
                    f"the dashboard cannot listen on 127.0.0.1:{number}: {error.strerror}",
                    (
                        "leave out --dashboard: a free port is chosen then",
                        "or: --dashboard off",
                    ),
                ) from error
    raise AssertionError("port 0 is always free")
