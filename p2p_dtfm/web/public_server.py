"""The public page's server: reads a request's first line, answers, and closes.

    GET /              the page
    GET /status.json   the same as data

It is not the dashboard's server, which is for this machine's user, holds a token and acts. This one
listens to everybody, so each thing that a stranger may use up has a bound. The bounds are on
connections, on bytes and seconds of a request, and on answers a second, of one address and of all.
No request changes anything, and an answer is made at most once in some seconds, however many ask.
"""

import asyncio
import contextlib
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports import now
from p2p_dtfm.web.public_facts import PublicFacts
from p2p_dtfm.web.public_page import public_html

log = logging.getLogger("p2p_dtfm")

CONNECTIONS_LIMIT = 64
CONNECTIONS_LIMIT_PER_ADDRESS = 16
HEAD_LIMIT_BYTES = 8192
PATIENCE_S = 5.0
MADE_ANEW_S = 2.0
ADDRESSES_REMEMBERED = 1024
HEADERS = (
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options: nosniff",
    "Referrer-Policy: no-referrer",
    "Cache-Control: no-cache",
    "Connection: close",
)


class Allowance:
    """Allows `most` answers at once, and `per_s` a second after that."""

    def __init__(self, most: float, per_s: float, now_s: float) -> None:
        self._most, self._per_s = most, per_s
        self._left, self._at_s = most, now_s

    def takes(self, now_s: float) -> bool:
        """Whether one more answer is allowed now. If so, it is used up."""
        gained = (now_s - self._at_s) * self._per_s
        self._left, self._at_s = min(self._most, self._left + gained), now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RateLimit:
    """Limits the answers to one address and to all. Forgets addresses that were not heard for
    long."""

    def __init__(self, now_s: float) -> None:
        self._all = Allowance(60, 30, now_s)
        self._each: OrderedDict[str, Allowance] = OrderedDict()

    def takes(self, address: str, now_s: float) -> bool:
        """Whether this address gets an answer now."""
        own = self._each.setdefault(address, Allowance(10, 1, now_s))
        self._each.move_to_end(address)
        if len(self._each) > ADDRESSES_REMEMBERED:
            self._each.popitem(last=False)
        return own.takes(now_s) and self._all.takes(now_s)


class PublicServer:
    """Serves what `facts()` says, to everybody who can reach the port."""

    def __init__(self, facts: Callable[[], PublicFacts], listener: socket.socket) -> None:
        self._facts = facts
        self._listener = listener
        self._limit = RateLimit(now.monotonic_s())
        self._made: tuple[float, dict[str, tuple[str, bytes]]] | None = None
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], str] = {}
        """Each open connection's task, with the address at the other end."""

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return int(self._listener.getsockname()[1])

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            self._meet, sock=self._listener, limit=HEAD_LIMIT_BYTES
        )
        name = socket.gethostname()
        log.info("a page that anybody may read: http://%s:%d/", name, self.port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in tuple(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        self._listener.close()

    def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ("",))[0])
        of_address = sum(each == address for each in self._open.values())
        is_full = len(self._open) >= CONNECTIONS_LIMIT
        if is_full or of_address >= CONNECTIONS_LIMIT_PER_ADDRESS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._talk(reader, writer, address))
        self._open[task] = address
        task.add_done_callback(self._open.pop)

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str
    ) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head, address))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a stranger that says nothing, says too much, or goes
        finally:
            with contextlib.suppress(RuntimeError):
                writer.transport.abort()

    def _answer(self, head: bytes, address: str) -> bytes:
        if not self._limit.takes(address, now.monotonic_s()):
            return _reply(429, "text/plain", b"too many questions: ask again in a minute\n")
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        if method not in (b"GET", b"HEAD"):
            return _reply(405, "text/plain", b"this page is only read\n")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("ascii", "replace")
        found = self._pages().get(path)
        if found is None:
            return _reply(404, "text/plain", b"there is / and /status.json\n", method == b"HEAD")
        kind, body = found
        return _reply(200, kind, body, method == b"HEAD")

    def _pages(self) -> dict[str, tuple[str, bytes]]:
        now_s = now.monotonic_s()
        if self._made is None or now_s - self._made[0] >= MADE_ANEW_S:
            facts = self._facts()
            page = public_html(facts).encode()
            pages = {
                "/": ("text/html; charset=utf-8", page),
                "/status.json": ("application/json", msgspec.json.encode(facts)),
            }
            self._made = (now_s, pages)
        return self._made[1]


_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 429: "Too Many Requests"}


def _reply(status: int, kind: str, body: bytes, head_only: bool = False) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Type: {kind}"]
    lines += [f"Content-Length: {len(body)}", *HEADERS, "", ""]
    return "\r\n".join(lines).encode() + (b"" if head_only else body)


def public_listener(port: int) -> socket.socket:
    """A listener on all of this machine's addresses. Raises `UserError` if the port is taken."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", port))
        listener.listen(CONNECTIONS_LIMIT)
    except OSError as error:
        listener.close()
        raise UserError(
            f"the public status page cannot listen on port {port}: {error.strerror}",
            ("choose another one: --public-status PORT", "or leave out --public-status"),
        ) from error
    return listener
