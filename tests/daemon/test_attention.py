"""A user who looks at no screen is told once of what lasts and of the end, and of nothing else."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.names import fault_of_name
from p2p_dtfm.daemon.dashboard.observer import Observer
from p2p_dtfm.daemon.machine.settings import Settings, resolve
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.daemon.telemetry.attention import outbox as outboxes
from p2p_dtfm.daemon.telemetry.attention.outbox import Outbox, outbox_of
from p2p_dtfm.daemon.telemetry.attention.watch import LEAST_DISK_BYTES, Notice, Watch
from p2p_dtfm.daemon.telemetry.problems import Sight, problems_in
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.web.state import DashboardState, History, Live, Problem

PLENTY = 100 << 30


def shown(
    state: str = "training", *problems: Problem, losses: tuple[float, ...] = ()
) -> DashboardState:
    live = Live(
        time_s=0.0,
        version="1",
        peer_id="",
        name="",
        state=state,
        reason="",
        since_s=0.0,
        problems=problems,
        step=100,
    )
    return DashboardState(live=live, history=History(loss=losses, step=tuple(range(len(losses)))))


def kinds(watch: Watch, state: DashboardState, times: range, free: int = PLENTY) -> list[str]:
    return [it.kind for at in times for it in watch.look(state, free, float(at))]


def test_a_problem_is_told_once_it_lasts_and_again_when_it_is_over() -> None:
    watch = Watch()
    late = [
        shown("training", Problem(f"no step for {at} s: this peer waits for Ada", "look"))
        for at in range(0, 200, 5)
    ]
    told = [(at, it) for at, state in enumerate(late) for it in watch.look(state, PLENTY, at * 5.0)]
    assert [(at * 5, it.kind) for at, it in told] == [(60, "problem")]
    assert "waits for Ada" in told[0][1].text and told[0][1].text.endswith("What helps: look")
    assert kinds(watch, shown(), range(200, 300, 5)) == ["over"]
    assert kinds(watch, shown(), range(300, 900, 5)) == []


@pytest.mark.parametrize("are_others_named", [False, True])
def test_what_lasts_is_not_over_because_it_is_said_in_other_words(are_others_named: bool) -> None:
    """From 100 s on the problem was told in minutes: the user heard that one problem was over and
    another began. Where each look named another absent peer, nobody was told for hours."""
    watch, told = Watch(), []
    for at in range(0, 8000, 5):
        sight = Sight(
            State.TRAINING,
            "step 3 of 9",
            1e4,
            uncommitted_s=20.0 + at,
            step_s=0.5,
            waits_for=("Ada", "bob", "carol")[: 1 + at // 5 % 3 * are_others_named],
            lost=("dave",),
            is_failing=are_others_named and at % 50 > 30,
        )
        told += watch.look(shown("training", *problems_in(sight)), PLENTY, float(at))
    assert [it.kind for it in told] == ["problem"]
    assert kinds(watch, shown(), range(8000, 8100, 5)) == ["over"]


def test_a_peer_that_each_member_says_is_barred_is_one_problem(tmp_path: Path) -> None:
    status = Status()
    observer, watch, told = Observer(status), Watch(), []
    for at in range(0, 300, 5):
        member = ("Ada", "bob", "carol")[at // 5 % 3]
        status.troubles.tell("barred", f"this peer is barred: {member} says that it lied", "wait")
        told += watch.look(observer.state(), PLENTY, float(at))
    observer.close()
    assert [it.kind for it in told] == ["problem"]


def test_what_cannot_be_seen_any_more_is_not_told_to_be_over() -> None:
    """The others went on without a peer that had told of a silent one. A minute later its user
    heard that this was over, and a minute after that, that nobody lets it in."""
    watch = Watch()
    assert kinds(watch, shown("training", Problem("x is silent", "y")), range(0, 65, 5)) == [
        "problem"
    ]
    for at, state in enumerate(("joining", "waiting", "measuring", "leaving", "paused")):
        begin = 100 + 200 * at
        assert kinds(watch, shown(state), range(begin, begin + 200, 5)) == [], state
    assert kinds(watch, shown(), range(1100, 1300, 5)) == ["over"]


def test_what_passes_by_itself_interrupts_nobody() -> None:
    watch = Watch()
    wrong = shown("training", Problem("bob fell silent", "nothing"))
    for begin in range(0, 1000, 100):
        assert kinds(watch, wrong, range(begin, begin + 50, 5)) == []
        assert kinds(watch, shown(), range(begin + 50, begin + 100, 5)) == []


def test_a_loss_that_rises_for_ten_minutes_and_a_disk_that_is_nearly_full() -> None:
    rising = tuple(2 + at / 50 + (at % 2) / 10 for at in range(90))
    watch = Watch()
    assert kinds(watch, shown(losses=rising), range(0, 595, 5)) == []
    assert kinds(watch, shown(losses=rising), range(595, 700, 5)) == ["problem"]
    falling = Watch()
    assert kinds(falling, shown(losses=rising[::-1]), range(0, 1200, 5)) == []
    told = Watch().look(shown(), LEAST_DISK_BYTES - 1, 0.0)
    assert [it.kind for it in told] == ["problem"] and "1.00 GiB" in told[0].text


def test_a_loss_that_rises_goes_on_rising_where_this_peer_does_not_train() -> None:
    """A minute after a peer had become a spare, or had begun to fetch layers, its user heard that
    it is over; so did whoever saw the run end with a loss that rose to the last step."""
    rising = tuple(2 + at / 50 + (at % 2) / 10 for at in range(90))
    for state in ("spare", "syncing", "done"):
        watch = Watch()
        assert kinds(watch, shown(losses=rising), range(0, 700, 5)) == ["problem"]
        told = kinds(watch, shown(state, losses=rising), range(700, 1400, 5))
        assert "over" not in told, state
        if state != "done":
            assert kinds(watch, shown(losses=rising[::-1]), range(1400, 1600, 5)) == ["over"]
    watch = Watch()
    assert kinds(watch, shown("spare", losses=rising), range(0, 700, 5)) == ["problem"]


def test_the_end_is_told_once() -> None:
    watch = Watch()
    assert kinds(watch, shown("done"), range(0, 100, 5)) == ["end"]


class Hook(HTTPServer):
    """Takes what is posted. It answers 500 to as many posts as it is told to."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.refuses = 0
        super().__init__(("127.0.0.1", 0), _Taker)


class _Taker(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.refuses -= 1
        if self.server.refuses >= 0:
            self.send_error(500)
            return
        self.server.taken.append(body)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def address_of(hook: Hook) -> str:
    return f"http://127.0.0.1:{hook.server_port}/secret-part"


async def send_once(hook: Hook, notice: Notice) -> None:
    outbox = Outbox(address_of(hook), to_desktop=False)
    outbox.send(notice)
    await outbox.close()


def test_a_webhook_is_told_in_words_that_chat_programs_show(hook: Hook) -> None:
    async def send() -> None:
        outbox = Outbox(address_of(hook), to_desktop=False)
        outbox.send(Notice("problem", "tiny: something is wrong", "no step"))
        outbox.send(Notice("end", "tiny is complete", "Thank you."))
        await outbox.close()

    asyncio.run(send())
    assert [it["kind"] for it in hook.taken] == ["problem", "end"]
    assert hook.taken[0]["text"] == hook.taken[0]["content"] == "tiny: something is wrong: no step"


@pytest.mark.parametrize(
    "name", ["@everyone", "<!channel>", "<@U012AB3CD>", "[fix](http://e.vil)", "<http://e.vil|fix>"]
)
def test_what_a_peer_is_called_calls_nobody_and_leads_nowhere(name: str, hook: Hook) -> None:
    """The owner of a peer chose its name, and a chat program would alert everybody in a channel."""
    assert not fault_of_name(name)
    asyncio.run(send_once(hook, Notice("problem", "tiny: something is wrong", f"{name} is gone")))
    (told,) = hook.taken
    assert told["allowed_mentions"] == {"parse": []}, "of Discord"
    assert "<" not in told["text"], "of Slack, and of Mattermost"
    for shown in (told["text"], told["content"]):
        assert "@everyone" not in shown and "](" not in shown
    assert told["message"] == f"{name} is gone", "for programs: as it is"


def test_a_line_is_no_longer_than_chat_programs_take(hook: Hook) -> None:
    asyncio.run(send_once(hook, Notice("problem", "tiny", "x" * 5000)))
    (told,) = hook.taken
    assert len(told["content"]) == 2000 and told["content"].endswith("x…")
    assert told["message"] == "x" * 5000


async def _sent_to(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    *notices: Notice,
) -> None:
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    outbox = Outbox(f"http://127.0.0.1:{port}/", to_desktop=False)
    for notice in notices:
        outbox.send(notice)
    await outbox.close()
    server.close()


def test_an_answer_that_is_none_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outboxes, "AGAIN_AFTER_S", (0.0,))

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"what?\r\n\r\n")
        await writer.drain()
        writer.close()

    both = Notice("problem", "one", "text"), Notice("end", "two", "text")
    asyncio.run(_sent_to(babble, *both))
    assert "was not told 'one'" in caplog.text


def test_one_that_fails_is_asked_again_and_its_secret_is_not_logged(
    hook: Hook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outboxes, "AGAIN_AFTER_S", (0.0, 0.01, 0.01))

    async def send() -> None:
        outbox = Outbox(address_of(hook), to_desktop=False)
        outbox.send(Notice("end", "tiny is complete", "Thank you."))
        await outbox.close()

    hook.refuses = 2
    asyncio.run(send())
    assert len(hook.taken) == 1 and not caplog.records
    hook.refuses = 99
    asyncio.run(send())
    assert len(hook.taken) == 1
    assert "127.0.0.1 was not told 'tiny is complete': it answers 500" in caplog.text
    assert "secret" not in caplog.text


def test_an_address_that_has_moved_has_not_taken_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service that wants `https://` redirects `http://`. The request that follows a redirect
    tells nobody anything."""
    monkeypatch.setattr(outboxes, "AGAIN_AFTER_S", (0.0,))
    asked: list[bytes] = []

    async def moved(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.split()[0])
        if asked[-1] == b"POST":
            writer.write(b"HTTP/1.0 301 Moved\r\nLocation: /secret-place\r\n\r\n")
        else:
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    asyncio.run(_sent_to(moved, Notice("problem", "one", "text")))
    assert asked == [b"POST"]
    assert "was not told 'one': it answers 301, and names another address" in caplog.text
    assert "secret" not in caplog.text


def test_a_daemon_that_cannot_go_on_says_so(hook: Hook, tmp_path: Path) -> None:
    """A run that does not exist ends the daemon, and nobody looks at its terminal."""
    settings = Settings(
        home=tmp_path / "home",
        dashboard="off",
        run="tinny",
        webhook=address_of(hook),
        listen=("/ip4/127.0.0.1/tcp/0",),
    )
    with pytest.raises(UserError):
        asyncio.run(Resident(settings).run())
    assert [it["kind"] for it in hook.taken] == ["end"]
    assert "tinny" in hook.taken[0]["message"]


def test_the_desktop_is_told_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon calls the program that desktops have for notices; a stand-in takes its place
    here."""
    program, taken = tmp_path / "notify-send", tmp_path / "taken"
    program.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > {taken}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in outboxes.SESSION:
        monkeypatch.delenv(name, raising=False)
    notice = Notice("problem", "--tiny", "no step")
    outboxes.show_on_desktop(notice)
    assert not taken.exists(), "no session"
    monkeypatch.setenv("DISPLAY", ":0")
    outboxes.show_on_desktop(notice)
    assert taken.read_text().endswith("--urgency=critical|--|--tiny|no step|")
    outboxes.show_on_desktop(Notice("problem", "tiny", "<a href=//x.yz>fix</a>\0 & gone"))
    told = "&lt;a href=//x.yz&gt;fix&lt;/a&gt;  &amp; gone"
    assert taken.read_text().endswith(f"|tiny|{told}|"), "desktops read a text as markup"


def test_experiments_on_loopback_tell_no_desktop_and_bad_addresses_are_refused(
    tmp_path: Path,
) -> None:
    here = Settings(home=tmp_path, listen=("/ip4/127.0.0.1/tcp/0",))
    assert outbox_of(here) is None
    assert outbox_of(Settings(home=tmp_path)) is not None
    assert outbox_of(Settings(home=tmp_path, notify=False)) is None
    for wrong in ("example.org/hook", "ftp://example.org", "http://"):
        with pytest.raises(UserError, match="webhook"):
            resolve(None, {"webhook": wrong})
