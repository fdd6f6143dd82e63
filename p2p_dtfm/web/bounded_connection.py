"""A connection to this machine's own pages, with bounds: any program here may call their port.

uvicorn answers 503 where there are too many connections, but only to one that has asked something.
Connections that ask nothing stay, and each takes a descriptor that the daemon needs for files and
peers.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS_LIMIT = 128
PATIENCE_S = 10.0
"""How long a request may take to come, or an answer may lie unread; at most twice as long."""


class BoundedConnection(H11Protocol):
    """Always uses h11, which bounds a request's head. uvicorn's own choice depends on what else is
    installed."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._seen: tuple[object, int] = (None, 0)
        self._looks: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= CONNECTIONS_LIMIT:
            transport.abort()
            return
        super().connection_made(transport)
        self._looks = self.loop.call_later(PATIENCE_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looks is None:
            return  # the connection was never taken
        self._looks.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """End a connection that has asked nothing since the last look, or has read nothing of a
        long answer."""
        is_answered = self.cycle is None or self.cycle.response_complete
        answered = self.cycle if is_answered else self
        unread_bytes = self.transport.get_write_buffer_size()
        before, unread_before_bytes = self._seen
        has_not_read = unread_bytes >= unread_before_bytes > 0
        if has_not_read or (is_answered and answered is before):
            self.transport.abort()
            return
        self._seen = (answered, unread_bytes)
        self._looks = self.loop.call_later(PATIENCE_S, self._look)
