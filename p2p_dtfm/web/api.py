"""The local API of one daemon: JSON over a unix socket that only its user can open."""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

Reader = Callable[[], Any]
Action = Callable[[], Awaitable[Any]]


def make_app(readers: dict[str, Reader], actions: dict[str, Action]) -> Starlette:
    """GET /NAME for each reader, POST /NAME for each action."""

    def get(reader: Reader) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def endpoint(request: Request) -> JSONResponse:
            return JSONResponse(reader())

        return endpoint

    def post(action: Action) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def endpoint(request: Request) -> JSONResponse:
            return JSONResponse(await action())

        return endpoint

    routes = [Route(f"/{name}", get(reader), methods=["GET"]) for name, reader in readers.items()]
    routes += [Route(f"/{name}", post(act), methods=["POST"]) for name, act in actions.items()]
    return Starlette(routes=routes)


class LocalApi:
    """Serves an app on a unix socket until closed."""

    def __init__(self, app: Starlette, socket: Path) -> None:
        self._socket = socket
        config = uvicorn.Config(
            app, uds=str(socket), log_config=None, access_log=False, lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        # the daemon has its own way to end; uvicorn must not take its signals
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.01)
        if self._task.done():
            await self._task
        os.chmod(self._socket, 0o600)

    async def close(self) -> None:
        if self._task is None:
            return
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._task
        self._socket.unlink(missing_ok=True)
