"""Calls over direct lines get the same answers, and go through libp2p wherever a line is missing or
ends."""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.direct import lines as lines_of
from p2p_dtfm.net.direct.call_line import AT_ONCE, HEAD, UNSENT_LIMIT_BYTES, CallLine
from p2p_dtfm.net.direct.call_lines import (
    FROM_ONE_LIMIT,
    IDLE_S,
    OFTEN_CALLS,
    RARELY_S,
    CallLines,
)
from p2p_dtfm.net.direct.lines import DirectLines
from p2p_dtfm.net.direct.sealed import Keys, SealedSocket
from p2p_dtfm.net.errors import NO_ANSWER, Refused, Unreachable
from p2p_dtfm.net.libp2p.control import BODY_LIMIT_BYTES, ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.shaping import LineLimit, Shape, ShapedLink, ShapedPeer, Shaper
from tests.net.net_support import LOOPBACK, hosts, run, until

RUN = "ab" * 32


class Peer:
    """A host with lines that answers calls; it counts what goes through libp2p."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.control = ControlPlane(host, self.answer)
        self.lines = DirectLines(host, RUN, LOOPBACK)
        self.lines.carry_calls(self.control)
        self.through_libp2p = 0
        self.deadlines_s: list[float] = []
        self.silent = asyncio.Event()
        self.silent.set()
        self.heard: list[bytes] = []
        plain = host.call

        async def counted(peer_id: str, name: str, body: bytes, deadline_s: float) -> bytes:
            self.through_libp2p += name.endswith("/control")
            self.deadlines_s.append(deadline_s)
            return await plain(peer_id, name, body, deadline_s)

        host.call = counted  # type: ignore[method-assign]

    async def answer(self, sender: str, body: bytes) -> bytes:
        self.heard.append(body)
        await self.silent.wait()
        if body == b"no":
            raise PeerFault("it is not allowed", sender)
        return sender[-4:].encode() + body

    @property
    def calls(self) -> CallLines:
        assert self.lines._calls is not None
        return self.lines._calls


@contextlib.asynccontextmanager
async def two_peers(folder: Path) -> AsyncIterator[tuple[Peer, Peer]]:
    async with hosts(folder, 2) as (one, two):
        await one.connect(two.peer_id, await two.addresses(), 5, is_chosen=True)
        peers = Peer(one), Peer(two)
        for peer in peers:
            await peer.control.ready()
            await peer.lines.ready(lambda peer_id, line: line.close())
        yield peers
        for peer in peers:
            await peer.lines.close()
            await peer.control.close()


async def with_a_line(one: Peer, two: Peer) -> None:
    """Call often enough, and wait until the calls have a line."""
    for number in range(OFTEN_CALLS):
        await one.control.call(two.host.peer_id, b"%d" % number, 5)
    await until(lambda: one.calls.is_direct(two.host.peer_id), "calls have a line")


def test_who_is_called_often_is_called_over_a_line_with_the_same_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            there, me = two.host.peer_id, one.host.peer_id[-4:].encode()
            assert await one.control.call(there, b"once", 5) == me + b"once"
            assert not one.calls.is_direct(there), "once is not often"
            await with_a_line(one, two)
            before, brought_s = one.through_libp2p, two.host.calling.heard_s
            bodies = [b"", b"a", b"b" * 4000, b"c" * 300_000, b"d" * (BODY_LIMIT_BYTES - 4)]
            answers = await asyncio.gather(*(one.control.call(there, it, 5) for it in bodies))
            assert answers == [me + body for body in bodies]
            with pytest.raises(Refused, match="it is not allowed"):
                await one.control.call(there, b"no", 5)
            assert one.through_libp2p == before, "libp2p has carried none of them"
            assert two.host.calling.heard_s == brought_s > 0, (
                "nor do they speak for a p2pd that hangs"
            )
            # the other direction gets a line of its own, once it is worth one
            assert not two.calls.is_direct(one.host.peer_id)
            await with_a_line(two, one)

    run(scenario())


def test_what_a_line_leaves_unanswered_goes_through_libp2p(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            there = two.host.peer_id
            await with_a_line(one, two)
            before = one.through_libp2p
            two.silent.clear()
            asked = asyncio.create_task(one.control.call(there, b"x", 5))
            await until(lambda: b"x" in two.heard, "it is asked")
            for line in list(two.calls._come):
                line.close()
            two.silent.set()
            assert (await asked).endswith(b"x")
            assert one.through_libp2p == before + 1
            assert not one.calls.is_direct(there), "and calls go there until they are many again"
            assert (await one.control.call(there, b"y", 5)).endswith(b"y")
            assert one.through_libp2p == before + 2

    run(scenario())


@pytest.mark.parametrize("is_limited", [False, True], ids=["free", "limited"])
def test_silence_is_told_in_time_and_costs_a_line_on_which_nothing_comes(
    tmp_path: Path, is_limited: bool
) -> None:
    """This also holds where the owner's limits apply. A dead line, as behind a router that has
    forgotten it, would be asked again and again, and libp2p never."""

    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            there = two.host.peer_id
            if is_limited:
                one.host.shaper = LineLimit(1_000_000, 1_000_000)
            await with_a_line(one, two)
            two.silent.clear()
            began_s = time.monotonic()
            with pytest.raises(Unreachable, match=NO_ANSWER):
                await one.control.call(there, b"x", 0.2)
            assert time.monotonic() - began_s < 1.0
            assert not one.calls.is_direct(there)
            two.silent.set()
            assert (await one.control.call(there, b"y", 5)).endswith(b"y")

    run(scenario())


def test_calls_of_a_limited_host_take_lines_and_are_held_to_its_limit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            there = two.host.peer_id
            one.host.shaper = LineLimit(100_000, 0)
            await with_a_line(one, two)
            assert not one.lines.wants(there), "its lanes keep to libp2p"
            before, began_s = one.through_libp2p, time.monotonic()
            assert (await one.control.call(there, bytes(50_000), 5)).endswith(bytes(50_000))
            assert time.monotonic() - began_s >= 0.45, "so long does its uplink take for that"
            assert one.through_libp2p == before

    run(scenario())


def test_the_largest_answer_comes_over_the_line_of_an_emulated_host_as_well(tmp_path: Path) -> None:
    """The answer also says when it left."""

    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            ids = [peer.host.peer_id for peer in (one, two)]
            links = tuple(ShapedLink(a, b, 1_000_000, 0) for a, b in (ids, ids[::-1]))
            shape = Shape("test", tuple(ShapedPeer(it[-4:], it) for it in ids), links)
            for peer in (one, two):
                peer.host.shaper = Shaper(shape, peer.host.peer_id)
            await with_a_line(one, two)
            before, body = one.through_libp2p, b"d" * (BODY_LIMIT_BYTES - 4)
            answer = await one.control.call(ids[1], body, 5)
            assert len(answer) == BODY_LIMIT_BYTES and one.through_libp2p == before

    run(scenario())


def test_who_is_not_near_keeps_to_libp2p(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            there = two.host.peer_id

            class _NobodyIsNear(type(two.host.door)):  # type: ignore[misc]
                def is_near(self, sender: str) -> bool:
                    return False

            two.host.door = _NobodyIsNear()
            for number in range(2 * OFTEN_CALLS):
                assert await one.control.call(there, b"%d" % number, 5)
            await until(lambda: not one.calls._opening, "it has tried")
            assert not two.calls._come
            assert (await one.control.call(there, b"z", 5)).endswith(b"z")

    run(scenario())


def test_a_peer_has_few_lines_and_the_oldest_goes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            held = []
            for _ in range(FROM_ONE_LIMIT + 3):
                held.append(await one.lines.connection(two.host.peer_id))
            await until(lambda: len(two.calls._come) == FROM_ONE_LIMIT, "the others are closed")
            assert len(set(two.calls._come.values())) == 1
            for connection in held:
                connection.close()
            await until(lambda: not two.calls._come, "ended lines are forgotten")

    run(scenario())


def _ends() -> tuple[SealedSocket, SealedSocket]:
    raw = socket.socketpair()
    for end in raw:
        end.setblocking(False)
    keys = [(Keys(b"k" * 32, b"one"), Keys(b"k" * 32, b"two")) for _ in raw]
    (a, b), (c, d) = keys
    return SealedSocket(raw[0], a, b), SealedSocket(raw[1], d, c)


def test_a_message_beyond_the_limit_ends_the_line_before_anything_is_kept() -> None:
    async def scenario() -> None:
        here, there = _ends()
        heard: list[bytes] = []
        ended = asyncio.Event()
        CallLine(here, lambda number, body: heard.append(body), ended.set)
        there.send(HEAD.pack(5, 1) + b"hello")
        there.send(HEAD.pack(BODY_LIMIT_BYTES * 2, 2))
        await asyncio.wait_for(ended.wait(), 5)
        assert heard == [b"hello"]
        there.close()

    run(scenario())


def test_who_does_not_listen_is_not_answered_for_ever() -> None:
    async def scenario() -> None:
        here, there = _ends()
        ended = asyncio.Event()
        line = CallLine(here, lambda number, body: None, ended.set)
        answers = 0
        while not line.is_closed:
            line.send(answers, b"x" * BODY_LIMIT_BYTES)
            answers += 1
            assert answers * BODY_LIMIT_BYTES < 2 * UNSENT_LIMIT_BYTES + (1 << 23)
        assert ended.is_set() and line._unsent_bytes > UNSENT_LIMIT_BYTES and not line._unsent
        there.close()

    run(scenario())


def test_changed_bytes_end_the_line() -> None:
    async def scenario() -> None:
        here, there = _ends()
        heard: list[bytes] = []
        ended = asyncio.Event()
        CallLine(here, lambda number, body: heard.append(body), ended.set)
        there.send(HEAD.pack(1, 1) + b"a")
        await until(lambda: heard == [b"a"], "one message")
        there._sending.next()  # as if a record had been left out
        there.send(HEAD.pack(1, 2) + b"b")
        await asyncio.wait_for(ended.wait(), 5)
        assert heard == [b"a"]
        there.close()

    run(scenario())


def test_many_messages_in_one_piece_all_come() -> None:
    async def scenario() -> None:
        here, there = _ends()
        heard: list[int] = []
        CallLine(here, lambda number, body: heard.append(number), lambda: None)
        other = CallLine(there, lambda number, body: None, lambda: None)
        for number in range(100):
            other.send(number, b"")
        await until(lambda: heard == list(range(100)), "all of them, in their order")
        other.close()

    run(scenario())


def test_who_floods_a_line_gets_no_more_of_the_event_loop_each_turn() -> None:
    async def scenario() -> None:
        here, there = _ends()
        heard: list[int] = []
        line = CallLine(here, lambda number, body: heard.append(number), lambda: None)
        nothing = HEAD.pack(0, 1) * 256
        most = before = turns = 0
        while len(heard) < 50_000:
            with contextlib.suppress(BlockingIOError):
                while True:  # as much as the kernel takes, all the time
                    there.send(nothing)
            await asyncio.sleep(0)
            most, before, turns = max(most, len(heard) - before), len(heard), turns + 1
        assert most <= AT_ONCE, f"{most} messages in one of {turns} turns"
        line.close()
        there.close()

    run(scenario())


def test_who_cuts_a_message_into_tiny_records_gets_no_more_of_the_event_loop_either() -> None:
    """A message may have a million such records."""
    taken = 0

    class Counted(SealedSocket):
        def recv_into(self, target: memoryview) -> int:
            nonlocal taken
            taken += 1
            return super().recv_into(target)

    async def scenario() -> None:
        here, there = _ends()
        here.__class__ = Counted
        heard: list[bytes] = []
        line = CallLine(here, lambda number, body: heard.append(body), lambda: None)
        content, sent = bytes(range(200)) * 20, 0
        data = HEAD.pack(len(content), 1) + content
        most = before = 0
        while not heard:
            with contextlib.suppress(BlockingIOError):
                while sent < len(data):
                    there.send(data[sent : sent + 1])
                    sent += 1
            await asyncio.sleep(0)
            most, before = max(most, taken - before), taken
        assert heard == [content]
        assert most <= AT_ONCE
        line.close()
        there.close()

    run(scenario())


class _Far:
    """Takes lines, as the `DirectLines` of a near peer would, and keeps what is asked there."""

    def __init__(self) -> None:
        self.taken = 0
        self.closes = False
        self.asked: list[int] = []
        self.line: CallLine | None = None

    def wants_calls(self, peer_id: str) -> bool:
        return True

    async def connection(self, peer_id: str) -> SealedSocket:
        here, there = _ends()
        self.taken += 1
        self.line = CallLine(there, lambda number, body: self.asked.append(number), lambda: None)
        if self.closes:
            self.line.close()
        return here


def _answers_nobody(sender: str, request: bytes) -> bytes:
    raise AssertionError("nobody asks here")


async def _lines_to(far: _Far) -> CallLines:
    lines = CallLines(far, _answers_nobody, lambda peer_id: True)
    for _ in range(OFTEN_CALLS):
        assert await lines.call("far", b"?", 5) is None
    await until(lambda: lines.is_direct("far"), "it has a line")
    return lines


def test_answers_that_nobody_asked_for_end_the_line_and_late_ones_do_not() -> None:
    async def scenario() -> None:
        far = _Far()
        lines = await _lines_to(far)
        assert far.line is not None
        asking = [asyncio.create_task(lines.call("far", b"?", 5)) for _ in range(3)]
        await until(lambda: len(far.asked) == 3, "they are asked")
        asking[0].cancel()
        await asyncio.wait({asking[0]})
        for number in far.asked:  # the first answer comes late
            far.line.send(number, b"!")
        assert await asyncio.gather(*asking[1:]) == [b"!", b"!"]
        assert lines.is_direct("far")
        far.line.send(far.asked[0], b"once more")
        await until(lambda: not lines.is_direct("far"), "it ends")
        lines.close()

    run(scenario())


def test_a_line_that_is_closed_at_once_is_made_more_and_more_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("p2p_dtfm.net.direct.call_lines.now.monotonic_s", lambda: now_s)

    async def scenario() -> None:
        nonlocal now_s
        far = _Far()
        far.closes = True
        lines = CallLines(far, _answers_nobody, lambda peer_id: True)

        async def ask_for(seconds: float) -> None:
            nonlocal now_s
            for _ in range(int(seconds * 4)):
                now_s += 0.25
                if lines.is_direct("far"):
                    return
                assert await lines.call("far", b"?", 5) is None
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        await ask_for(1200)
        assert 2 < far.taken < 16, f"{far.taken} lines in twenty minutes"
        far.closes = False
        await ask_for(RARELY_S)
        assert lines.is_direct("far"), "but not never"
        lines.close()

    run(scenario())


def test_who_is_near_no_more_loses_its_line_with_what_it_asks_next(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            await with_a_line(one, two)
            two.calls._is_near = lambda peer_id: False
            before = one.through_libp2p
            assert (await one.control.call(two.host.peer_id, b"x", 5)).endswith(b"x")
            assert one.through_libp2p == before + 1, "where it is told why"
            assert not two.calls._come and not one.calls.is_direct(two.host.peer_id)

    run(scenario())


def test_what_is_asked_again_through_libp2p_has_the_time_that_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            await with_a_line(one, two)
            two.silent.clear()
            asked = asyncio.create_task(one.control.call(two.host.peer_id, b"x", 30))
            await until(lambda: b"x" in two.heard, "it is asked")
            await asyncio.sleep(0.3)
            for line in list(two.calls._come):
                line.close()
            await until(lambda: two.heard.count(b"x") == 2, "it is asked again")
            two.silent.set()
            assert (await asked).endswith(b"x")
            assert 20 < one.deadlines_s[-1] < 29.8

    run(scenario())


def test_where_a_line_cannot_be_worked_libp2p_carries_the_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[SealedSocket] = []

    def no_descriptor_left(connection: SealedSocket, *others: object) -> None:
        taken.append(connection)
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario() -> None:
        async with two_peers(tmp_path) as (one, two):
            monkeypatch.setattr(lines_of, "DirectLine", no_descriptor_left)
            with pytest.raises(Unreachable, match="Too many open files"):
                await one.lines.open(two.host.peer_id)
            assert not one.lines.works(two.host.peer_id)
            await until(lambda: len(taken) == 2, "the other end has tried as well")
            assert [connection.fileno() for connection in taken] == [-1, -1], "they are closed"

    run(scenario())


def test_where_all_places_are_taken_the_line_that_is_idle_longest_gives_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr("p2p_dtfm.net.direct.call_lines.now.monotonic_s", lambda: now_s)
    monkeypatch.setattr("p2p_dtfm.net.direct.call_lines.LINES_LIMIT", 2)

    async def scenario() -> None:
        nonlocal now_s
        heard: list[str] = []

        def answer(sender: str, request: bytes) -> bytes:
            heard.append(sender)
            return b""

        lines = CallLines(_Far(), answer, lambda peer_id: True)
        far = {}
        for peer in "ab":
            here, far[peer] = _ends()
            lines.take(peer, here)
        now_s = IDLE_S
        far["a"].send(HEAD.pack(0, 1))
        await until(lambda: heard == ["a"], "it has asked")
        for peer in "cd":
            here, far[peer] = _ends()
            lines.take(peer, here)
        assert list(lines._come.values()) == ["a", "c"]
        lines.close()
        for end in far.values():
            end.close()

    run(scenario())


def test_a_timer_that_is_a_moment_early_does_not_keep_a_dead_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """uvloop's timers are in whole milliseconds, and each call follows an answer at once."""
    now_s = 0.0
    monkeypatch.setattr("p2p_dtfm.net.direct.call_lines.now.monotonic_s", lambda: now_s)

    async def scenario() -> None:
        nonlocal now_s
        lines = await _lines_to(_Far())
        asking = asyncio.create_task(lines.call("far", b"?", 0.1))
        await asyncio.sleep(0)
        now_s = 0.0993
        with pytest.raises(Unreachable, match=NO_ANSWER):
            await asking
        assert not lines.is_direct("far")

    run(scenario())
