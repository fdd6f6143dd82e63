"""The local API of one daemon: JSON over a unix socket that only its user can open."""

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.web.server import Server

Reader = Callable[[], Any]
Action = Callable[[], Awaitable[Any]]
Question = Callable[[Mapping[str, str]], Awaitable[Any]]


def make_app(
    readers: Mapping[str, Reader],
    actions: Mapping[str, Action],
    questions: Mapping[str, Question] | None = None,
    orders: Mapping[str, Question] | None = None,
) -> Starlette:
    """An app that serves readers and questions by GET, and actions and orders by POST, each at
    /NAME. Questions and orders are given the address's parameters."""

    def get(reader: Reader) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def endpoint(request: Request) -> JSONResponse:
            return JSONResponse(reader())

        return endpoint

    def post(action: Action) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def endpoint(request: Request) -> JSONResponse:
            return JSONResponse(await action())

        return endpoint

    def put(question: Question) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def endpoint(request: Request) -> JSONResponse:
            return JSONResponse(await question(request.query_params))

        return endpoint

    routes = [Route(f"/{name}", get(reader), methods=["GET"]) for name, reader in readers.items()]
    routes += [Route(f"/{name}", post(act), methods=["POST"]) for name, act in actions.items()]
    routes += [Route(f"/{name}", put(asked)) for name, asked in (questions or {}).items()]
    for name, ordered in (orders or {}).items():
        routes.append(Route(f"/{name}", put(ordered), methods=["POST"]))
    return Starlette(routes=routes)


def refusal_answer(error: UserError) -> dict[str, Any]:
    """An answer that is a refusal. `daemon.machine.local_client` raises it for the command."""
    return {"error": error.cause, "fixes": list(error.fixes)}


class LocalApi:
    """Serves an app on a unix socket until closed."""

    def __init__(self, app: Starlette, path: Path) -> None:
        self._app = app
        self._path = path
        self._server: Server | None = None

    async def start(self) -> None:
        """Start to serve. Raises `UserError` where something stands in the way, such as another
        user's file."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            os.chmod(self._path, 0o600)  # before anybody can connect
        except OSError as error:
            listener.close()
            raise UserError(
                f"cannot use {self._path}: {error.strerror or error}", self._fixes(error)
            ) from error
        listener.listen()
        self._server = Server(self._app, listener)
        await self._server.start()

    def _fixes(self, error: OSError) -> tuple[str, ...]:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ("free space on that disk",)
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP) and not os.path.lexists(self._path):
            return ("choose another --home, whose disk takes sockets: FAT and exFAT take none",)
        return ("see what lies there, and remove it", "choose another --home, of a shorter path")

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._path.unlink(missing_ok=True)
