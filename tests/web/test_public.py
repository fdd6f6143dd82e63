"""The page that anybody may read: what it shows, what it must not show, and what strangers may use
up."""

import asyncio
import contextlib
import socket

import msgspec
import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.invited.line import open_line, read_line
from p2p_dtfm.web.public_facts import public_facts
from p2p_dtfm.web.public_page import public_html
from p2p_dtfm.web.public_server import (
    ADDRESSES_REMEMBERED,
    CONNECTIONS_LIMIT,
    PublicServer,
    RateLimit,
    public_listener,
)
from p2p_dtfm.web.qr import qr_picture
from p2p_dtfm.web.state import (
    BoardRow,
    DashboardState,
    Event,
    Problem,
    RefusedCount,
    ViewState,
)
from tests.web.examples import Example, two

OTHERS = "/ip4/198.51.100.9/tcp/31330/p2p/other"
SECRETS = ("/home/ada", "token-0123456789", "192.0.2.77", "a-device-of-mine", "Ada-of-London")


@pytest.fixture(scope="module")
def example() -> Example:
    return two()


def with_secrets(state: DashboardState) -> DashboardState:
    """A state with private texts in every place that can hold one."""
    every = " ".join(SECRETS)
    replace = msgspec.structs.replace
    view = replace(
        state.view,
        peers=tuple(
            replace(it, name=every, device=every, peer_id=every) for it in state.view.peers
        ),
        join_line=f"p2p-dtfm --invite {open_line('ab' * 32, (OTHERS,)).text()} {every}",
        no_plan=every,
    )
    live = replace(
        state.live, peer_id=every, name=every, reason=every, waits_for=(every,), next=(every,),
        work=every, problems=(Problem(every, every),),
        refused=(RefusedCount("a", every, every, 1),),
    )  # fmt: skip
    board = replace(state.contribution, board=(BoardRow(every, every, 1.0),))
    events = (Event(0.0, "fault", every),)
    return replace(state, live=live, view=view, contribution=board, events=events)


def shown(state: DashboardState) -> str:
    facts = public_facts(state)
    return public_html(facts) + msgspec.json.encode(facts).decode()


def test_it_shows_the_run_and_nobody(example: Example) -> None:
    state = with_secrets(example.state)
    live = msgspec.structs.replace(state.live, marks=("shaped links: secret-two of a-town",))
    text = shown(msgspec.structs.replace(state, live=live))
    for secret in (*SECRETS, "secret-two", "a-town"):
        assert secret not in text
    assert "shaped links" in text
    assert state.run.name in text and f"{state.live.loss:.3f}" in text
    assert "<dt>peers</dt><dd>2</dd>" in text and text.count('r="6"') == 2
    assert "class Error(Exception)" in text
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in text, "what the model writes is text"


def test_the_line_to_join_with_has_no_other_members_address(example: Example) -> None:
    mine = "/ip4/203.0.113.5/tcp/31330/p2p/me"
    line = f"p2p-dtfm --invite {open_line('ab' * 32, (mine,)).text()}"
    state = with_secrets(example.state)
    view = msgspec.structs.replace(state.view, own_join_line=line)
    text = shown(msgspec.structs.replace(state, view=view))
    words = [word for word in text.replace("<", " ").replace('"', " ").split() if "p2pi1-" in word]
    assert words and {address for it in words for address in read_line(it).addresses} == {mine}
    assert qr_picture(line).path in text
    assert "need an invitation" in shown(state), "a run by invitation, or a peer behind a router"


def test_nobody_is_invited_to_a_complete_run(example: Example) -> None:
    """A user who followed the line was told that nothing is left to do."""
    state = example.state
    assert state.run is not None
    view = msgspec.structs.replace(state.view, own_join_line="p2p-dtfm --invite p2pi1-x")
    state = msgspec.structs.replace(state, view=view)
    assert "Type this where" in shown(state)
    live = msgspec.structs.replace(state.live, step=state.run.total_steps, state="done")
    page = public_html(public_facts(msgspec.structs.replace(state, live=live)))
    assert "The run is complete" in page and "Type this" not in page and "p2pi1" not in page


def test_of_what_is_not_known_there_is_a_page(example: Example) -> None:
    live = msgspec.structs.replace(
        example.state.live, loss=None, eta_s=None, tokens_per_s=None, held_out_loss=None
    )
    assert "being prepared" in shown(DashboardState(live))
    live = msgspec.structs.replace(live, eta_s=1_029_960.0)
    page = shown(msgspec.structs.replace(example.state, live=live))
    assert "<dd>11 days 22 h</dd>" in page, "as on the dashboard"


def test_who_is_in_no_view_does_not_say_that_nobody_takes_part(example: Example) -> None:
    """A member that paused said on its public page that a run of hundreds has 0 peers."""
    live = msgspec.structs.replace(example.state.live, state="paused")
    state = msgspec.structs.replace(example.state, live=live, view=ViewState())
    page = public_html(public_facts(state))
    for name in ("peers", "pipelines"):
        assert f"<dt>{name}</dt><dd>–</dd>" in page
    view = msgspec.structs.replace(example.state.view, pipelines=())
    page = public_html(public_facts(msgspec.structs.replace(example.state, view=view)))
    assert "<dt>pipelines</dt><dd>0</dd>" in page, "without a plan there are none"


def test_one_address_and_all_together_get_so_many_answers() -> None:
    limit = RateLimit(0.0)
    assert [limit.takes("a", 0.0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert limit.takes("a", 1.0) and not limit.takes("a", 1.0)
    limit = RateLimit(0.0)
    answered = sum(limit.takes(str(number), 0.0) for number in range(3 * ADDRESSES_REMEMBERED))
    assert answered == 60 and len(limit._each) == ADDRESSES_REMEMBERED


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def test_it_is_read_only_and_ends_though_somebody_says_nothing(example: Example) -> None:
    async def play() -> None:
        server = PublicServer(lambda: public_facts(example()), public_listener(0))
        await server.start()
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        page = await ask(server.port, b"GET / HTTP/1.1\r\nHost: anywhere\r\n\r\n")
        assert page.startswith(b"HTTP/1.1 200 OK") and b"Content-Security-Policy: default" in page
        head, _, body = page.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head and b"<script" not in body
        data = await ask(server.port, b"GET /status.json HTTP/1.1\r\n\r\n")
        assert msgspec.json.decode(data.partition(b"\r\n\r\n")[2])["step"] == 120
        for path in (b"/api/state", b"/metrics", b"/static/main.js", b"/../etc/passwd", b"\xff"):
            assert (await ask(server.port, b"GET " + path + b" x\r\n\r\n"))[9:12] == b"404"
        written = await ask(server.port, b"POST /api/actions/leave HTTP/1.1\r\n\r\n")
        assert written[9:12] == b"405" and not example.asked
        more = [await ask(server.port, b"GET / x\r\n\r\n") for _ in range(5)]
        assert more[-1][9:12] == b"429"
        assert await ask(server.port, b"x" * 20_000) == b"", "too long"
        await server.close()
        for _, writer in silent:
            writer.close()

    asyncio.run(play())


def test_so_many_connections_are_held_and_no_more(example: Example) -> None:
    async def play() -> None:
        server = PublicServer(lambda: public_facts(example()), public_listener(0))
        await server.start()
        held = [
            await asyncio.open_connection(
                "127.0.0.1", server.port, local_addr=(f"127.0.0.{2 + number % 8}", 0)
            )
            for number in range(CONNECTIONS_LIMIT)
        ]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 3) == b"", "it is hung up on"
        await server.close()
        for each in (*(opened for _, opened in held), writer):
            each.close()

    asyncio.run(play())


def test_one_address_keeps_no_other_from_the_page(example: Example) -> None:
    """One address held all connections, each for five seconds, and nobody else got the page."""

    async def play() -> None:
        server = PublicServer(lambda: public_facts(example()), public_listener(0))
        await server.start()
        held = [
            await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.9", 0))
            for _ in range(CONNECTIONS_LIMIT)
        ]
        page = await ask(server.port, b"GET / HTTP/1.1\r\n\r\n")
        assert page.startswith(b"HTTP/1.1 200 OK")
        await server.close()
        for _, writer in held:
            writer.close()

    asyncio.run(play())


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(UserError, match=str(taken.getsockname()[1])):
            public_listener(taken.getsockname()[1])
