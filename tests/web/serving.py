"""A dashboard that uvicorn serves in a thread, as browsers and http clients meet it."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from p2p_dtfm.web.dashboard import Dashboard
from p2p_dtfm.web.server import Server, loopback_listener
from tests.web.examples import Example

TOKEN = "a-token-of-tests-0123456789"


@contextlib.contextmanager
def served(example: Example, interval_s: float = 0.1, port: int = 0) -> Iterator[str]:
    """Serve the example; yields the address, without the token."""
    listener = loopback_listener(port)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    started = threading.Event()
    loop = asyncio.new_event_loop()
    ending = asyncio.Event()

    async def serve() -> None:
        dashboard = Dashboard(example, lambda: example.actions, TOKEN, interval_s)
        server = Server(dashboard.app, listener)
        await server.start()
        started.set()
        await ending.wait()
        dashboard.end_streams()
        await server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield address
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(10)
        assert not thread.is_alive(), "the server ends"
        loop.close()
