"""Any program of this machine may call the dashboard's port. It must not take all connections that
a daemon may have open, nor keep the daemon's user out of the page."""

import contextlib
import select
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from p2p_dtfm.web import bounded_connection
from p2p_dtfm.web.bounded_connection import CONNECTIONS_LIMIT
from p2p_dtfm.web.dashboard import WATCHERS_LIMIT
from p2p_dtfm.web.server import loopback_listener
from tests.web import serving
from tests.web.examples import two
from tests.web.serving import served

SOON_S = 0.2


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(bounded_connection, "PATIENCE_S", SOON_S)
    with served(two()) as address:
        yield address


def calls(address: str) -> socket.socket:
    called = socket.create_connection(("127.0.0.1", urlsplit(address).port or 0), 10)
    called.settimeout(10)
    return called


def is_closed(called: socket.socket) -> bool:
    """Whether the other side has closed the connection, within the time that it has. The test does
    not read what may still come."""
    poll = select.poll()
    poll.register(called, select.POLLRDHUP)
    return bool(poll.poll(10_000))


def opens(page: str) -> bool:
    try:
        urllib.request.urlopen(page, timeout=10).close()
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False
    return True


def is_open_now(called: socket.socket) -> bool:
    called.setblocking(False)
    try:
        return called.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def test_there_are_so_many_connections_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(two()) as address, contextlib.ExitStack() as stack:
        held = [stack.enter_context(calls(address)) for _ in range(2 * CONNECTIONS_LIMIT)]
        end_s = time.monotonic() + 10
        while (found := sum(map(is_open_now, held))) > CONNECTIONS_LIMIT:
            assert time.monotonic() < end_s, f"{found} connections are open"
            time.sleep(0.05)
        assert found == CONNECTIONS_LIMIT


def test_who_says_nothing_keeps_nobody_out(address: str) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(calls(address)) for _ in range(CONNECTIONS_LIMIT)]
        assert all(map(is_closed, silent))
        assert urllib.request.urlopen(f"{address}api/state", timeout=10).status == 200


def test_a_question_that_drips_is_not_waited_for(address: str) -> None:
    with calls(address) as called:
        called.sendall(b"GET /api/state HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert called.recv(1 << 16).startswith(b"HTTP/1.1 200")
        end_s = time.monotonic() + 10
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end_s:  # each letter ends the time that it may keep silent
                called.sendall(b"G")
                time.sleep(SOON_S / 4)
            pytest.fail("who drips is listened to for ever")


def test_who_does_not_read_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, sixteen such readers take all the room that there is for open pages."""

    def hardly_buffered(port: int | None) -> socket.socket:
        listener = loopback_listener(port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    monkeypatch.setattr(bounded_connection, "PATIENCE_S", SOON_S)
    monkeypatch.setattr(serving, "loopback_listener", hardly_buffered)
    with served(two(), 0.01) as address, contextlib.ExitStack() as stack:
        unread = []
        for _ in range(WATCHERS_LIMIT):
            unread.append(stack.enter_context(calls(address)))
            unread[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            unread[-1].sendall(b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert unread[-1].recv(12) == b"HTTP/1.1 200"
        end_s = time.monotonic() + 10
        while not opens(f"{address}api/events"):
            assert time.monotonic() < end_s, "pages that nobody reads keep all others out"
            time.sleep(SOON_S)


def test_what_a_web_page_sends_is_not_written_into_the_log(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each `new WebSocket` of any web page left two warnings. They told the user to install what
    the daemon does not want."""
    upgrade = (
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    for question in (upgrade, b"\xff\r\n\r\n"):
        with calls(address) as called:
            called.sendall(question)
            assert called.recv(9) == b"HTTP/1.1 "
    assert not caplog.records


def test_an_open_page_stays_open(address: str) -> None:
    with urllib.request.urlopen(f"{address}api/events", timeout=10) as page:
        end_s = time.monotonic() + 6 * SOON_S
        while time.monotonic() < end_s:
            assert page.readline() != b""
