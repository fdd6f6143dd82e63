"""The dashboard's server: a page, the state as server-sent events, metrics, and a few actions.

    GET  /                    the page and its modules
    GET  /api/state           the whole state as one JSON object
    GET  /api/invitation      the line to join with as a QR code
    GET  /api/events          the state as it changes, as server-sent events
    GET  /report.html         what became of a complete run
    GET  /metrics             for Prometheus
    POST /api/actions/NAME    an action of the daemon; needs the token

Events: `hello` (once, with the program's version, at a change of which a page loads itself anew),
then `run`, `view`, `timeline`, `events` and `actions` whole whenever they change, `history` from
the row on where it grew, and `live` every second, from which a page sees that its data are fresh.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from p2p_dtfm.web.api import Action
from p2p_dtfm.web.guard import RequestGuard
from p2p_dtfm.web.metrics import metrics_text
from p2p_dtfm.web.qr import QrPicture, qr_picture
from p2p_dtfm.web.report import STYLE_POLICY, report_html
from p2p_dtfm.web.state import DashboardState, History

STATIC = Path(__file__).parent / "static"
INTERVAL_S = 1.0
WATCHERS_LIMIT = 16
DONE = "done"
WHOLE_PARTS = ("run", "view", "timeline", "samples", "contribution", "events")
HISTORY_GROUPS = (
    ("step", "loss", "tokens_per_s"),
    ("held_out_step", "held_out_loss"),
    ("view_step",),
)
"""Columns that grow together."""


class Dashboard:
    """`provider()` gives the present state; unchanged parts of it should be the same objects.
    `actions()` gives the actions that the daemon offers now."""

    def __init__(
        self,
        provider: Callable[[], DashboardState],
        actions: Callable[[], Mapping[str, Action]],
        token: str,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.watchers = 0
        """Pages that are open now."""
        self._provider = provider
        self._actions = actions
        self._interval_s = interval_s
        self._closing = asyncio.Event()
        routes = [
            Route("/", self._index),
            Route("/api/state", self._state),
            Route("/api/invitation", self._invitation),
            Route("/api/events", self._events),
            Route("/api/actions/{name}", self._act, methods=["POST"]),
            Route("/report.html", self._report),
            Route("/metrics", self._metrics),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        self.app: ASGIApp = RequestGuard(Starlette(routes=routes), token)

    def end_streams(self) -> None:
        """Let open pages go, so that the server can end at once."""
        self._closing.set()

    async def _index(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _state(self, request: Request) -> Response:
        return Response(msgspec.json.encode(self._provider()), media_type="application/json")

    async def _invitation(self, request: Request) -> Response:
        """The QR code, made when a page asks for it: a swarm without an open page draws none."""
        line = self._provider().view.join_line
        picture = await asyncio.to_thread(qr_picture, line) if line else QrPicture()
        told = {"line": line, **msgspec.to_builtins(picture)}
        return Response(msgspec.json.encode(told), media_type="application/json")

    async def _report(self, request: Request) -> Response:
        state = self._provider()
        if state.run is None or state.live.step < state.run.total_steps:
            return PlainTextResponse("the run is not complete yet\n", 404)
        commands = state.live.next if state.live.state == DONE else ()
        page = await asyncio.to_thread(report_html, state, commands)
        return HTMLResponse(page, headers={"Content-Security-Policy": STYLE_POLICY})

    async def _metrics(self, request: Request) -> Response:
        text = metrics_text(self._provider)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _act(self, request: Request) -> Response:
        action = offered(self._actions(), self._provider()).get(request.path_params["name"])
        if action is None:
            return PlainTextResponse("there is no such action\n", 404)
        return Response(msgspec.json.encode(await action()), media_type="application/json")

    async def _events(self, request: Request) -> Response:
        if self.watchers >= WATCHERS_LIMIT:
            return PlainTextResponse(f"{WATCHERS_LIMIT} pages are open already\n", 503)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        self.watchers += 1
        try:
            version = self._provider().live.version
            yield _event("hello", {"interval_s": self._interval_s, "version": version})
            seen: DashboardState | None = None
            shown: list[str] | None = None
            while not self._closing.is_set():
                state = self._provider()
                for name, part in changes(seen, state):
                    yield _event(name, part)
                seen = state
                names = list(offered(self._actions(), state))
                if shown != names:
                    shown = names
                    yield _event("actions", shown)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._closing.wait()
        finally:
            self.watchers -= 1


def offered(actions: Mapping[str, Action], state: DashboardState) -> Mapping[str, Action]:
    """The actions that are offered in this state: a complete run has nothing to pause."""
    if state.live.state != DONE:
        return actions
    return {name: action for name, action in actions.items() if name != "pause"}


def changes(seen: DashboardState | None, state: DashboardState) -> list[tuple[str, Any]]:
    """(event, data) for a page that has `seen`: everything for a new one."""
    found: list[tuple[str, Any]] = []
    for name in WHOLE_PARTS:
        part = getattr(state, name)
        if seen is None or getattr(seen, name) is not part:
            found.append((name, part))
    grown = _grown(seen.history if seen else None, state.history)
    if grown is not None:
        found.append(("history", grown))
    found.append(("live", state.live))
    return found


def _grown(seen: History | None, history: History) -> dict[str, Any] | None:
    """The new part of the columns, and the row from which it starts; None where nothing is new."""
    if seen is history:
        return None
    same = seen is not None and seen.generation == history.generation
    grown: dict[str, Any] = {"generation": history.generation}
    for group in HISTORY_GROUPS:
        start = len(getattr(seen, group[0])) if same else 0
        grown[f"{group[0]}_from"] = start
        for name in group:
            grown[name] = getattr(history, name)[start:]
    return grown


def _event(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
