"""Connections that wait at the listener: few at a time, and not for long.

A connection that has not shown a trusted certificate costs a descriptor and a task. At most
`WAITING_LIMIT` wait. If more come, the host that has most of them loses the one that has waited
longest. They are taken in a few at a time, so that a crowd costs this process little.
"""

import asyncio
import collections
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

from p2p_dtfm.net.direct.handshake import answer, shake_hands
from p2p_dtfm.net.direct.sealed import SealedSocket
from p2p_dtfm.net.direct.trust import Trust

WAITING_LIMIT = 32
HANDSHAKE_S = 5.0
BACKLOG = 128
AT_ONCE = 8
PAUSE_S = 0.02
"""The pause after every `AT_ONCE` connections: 400 a second at most."""
KEEPALIVE_S = (15, 5, 4)
"""Seconds of silence before the first probe, seconds between probes, and the number of probes
before the connection is gone."""
BEYOND_STALL_S = 5.0
"""The kernel gives up unacknowledged bytes so long after the line itself would have. Linux counts
the time in which a living receiver takes nothing. A shorter time would break lines whose other end
only waits for room."""

Welcome = Callable[[str, SealedSocket, bytes], None]
log = logging.getLogger(__name__)


class Reception:
    """Listens, and hands on connections that TLS has let in: `welcome(peer_id, connection,
    purpose)`."""

    def __init__(self, trust: Trust, welcome: Welcome, stall_s: float) -> None:
        """`stall_s`: how long a line may stand still."""
        self._stall_s = stall_s
        self._trust = trust
        self._welcome = welcome
        self._listeners: list[socket.socket] = []
        self._waiting: dict[asyncio.Task[None], str] = {}
        """Those that wait, in the order in which they came, with the host that each comes from."""
        self._loop = asyncio.get_running_loop()
        self._paused: set[asyncio.TimerHandle] = set()

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def listen(self, hosts: tuple[str, ...], wanted_port: int) -> int:
        """Listen, and return the port, the same for all hosts; 0 where none of them is this
        machine's."""
        port = wanted_port
        for host in hosts:
            listener = _listener(host, port) or (
                _listener(host, 0) if not self._listeners else None
            )
            if listener is None:
                log.info("no direct lines at %s", host)
                continue
            port = listener.getsockname()[1]
            self._listeners.append(listener)
            self._open(listener)
        return port if self._listeners else 0

    def close(self) -> None:
        """Stop listening, and send away all who wait."""
        for timer in self._paused:
            timer.cancel()
        for listener in self._listeners:
            self._loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        for task in self._waiting:
            task.cancel()

    def _open(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener, self._take_in, listener)

    def _take_in(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, far_end = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is left, or the caller went away meanwhile
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    break
                continue
            self._receive(connection, str(far_end[0]))
        self._loop.remove_reader(listener)
        timer = self._loop.call_later(PAUSE_S, lambda: self._after_pause(listener))
        self._paused = {timer, *(t for t in self._paused if t.when() > self._loop.time())}

    def _after_pause(self, listener: socket.socket) -> None:
        self._open(listener)

    def _receive(self, connection: socket.socket, host: str) -> None:
        if len(self._waiting) >= WAITING_LIMIT:
            crowd, _ = collections.Counter(self._waiting.values()).most_common(1)[0]
            oldest = next(task for task, its in self._waiting.items() if its == crowd)
            del self._waiting[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._greet(connection), name="direct line, unknown")
        self._waiting[task] = host
        task.add_done_callback(lambda done: self._waiting.pop(done, None))

    async def _greet(self, raw: socket.socket) -> None:
        connection: ssl.SSLSocket | socket.socket = raw
        try:
            raw.setblocking(False)
            prepare(raw, self._stall_s)
            secured = connection = self._trust.wrap(raw, is_server=True)
            async with asyncio.timeout(HANDSHAKE_S):
                await shake_hands(secured)
                peer_id = self._trust.owner_of(secured)
                if peer_id is not None:
                    self._welcome(peer_id, *await answer(secured))
        except OSError as error:  # TimeoutError and ssl.SSLError are OSErrors
            log.debug("a direct line was not made: %s", error)
        finally:
            connection.close()


def _listener(host: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        return None
    return listener


def prepare(connection: socket.socket, stall_s: float) -> None:
    """Let small words leave at once, and notice a vanished peer while nothing is said."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    unacknowledged_ms = int((stall_s + BEYOND_STALL_S) * 1000)
    for name, value in zip(names, (*KEEPALIVE_S, unacknowledged_ms), strict=True):
        if hasattr(socket, name):  # not every system has all options
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
