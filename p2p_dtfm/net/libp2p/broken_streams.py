"""Streams that break before they have said anything: hivemind leaves their errors to the loop."""

import asyncio
import logging
from typing import Any

log = logging.getLogger("p2p_dtfm.net")


def expect_broken_streams(loop: asyncio.AbstractEventLoop) -> None:
    """Such an error is no news: who opened the stream is watched, and told of, elsewhere."""

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_greeting = "client_connected_cb" in context.get("message", "")
        if is_greeting and isinstance(error, asyncio.IncompleteReadError | ConnectionError):
            log.debug("a stream broke before it was greeted: %r", error)
        else:
            loop.default_exception_handler(context)

    if loop.get_exception_handler() is None:
        loop.set_exception_handler(handle)
