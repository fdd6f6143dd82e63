"""Short messages go without the line's thread, whether they are there already or are waited for."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.direct.line import AT_ONCE_BYTES, DirectLine
from p2p_dtfm.net.direct.sealed import PIECE_BYTES, SECRET_BYTES, Keys, SealedSocket

SECRET = bytes(range(SECRET_BYTES)) * 2
STALL_S = 20.0


class Counted(DirectLine):
    """Counts how often the line's thread was woken."""

    woken = 0

    def _ring(self) -> bool:
        self.woken += 1
        return super()._ring()


def lines() -> tuple[Counted, Counted]:
    ours, theirs = socket.socketpair()
    made = []
    for end, out, back in ((ours, b"out", b"back"), (theirs, b"back", b"out")):
        end.setblocking(False)
        sealed = SealedSocket(end, Keys(SECRET, out), Keys(SECRET, back))
        made.append(Counted(sealed, STALL_S, lambda: None))
    return made[0], made[1]


def played(story: Callable[[Counted, Counted], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        here, there = lines()
        try:
            await asyncio.wait_for(story(here, there), 60)
        finally:
            here.close()
            there.close()

    event_loop.run(bounded())


async def filled(line: DirectLine, size_bytes: int) -> bytes:
    target = bytearray(size_bytes)
    if (rest := line.read_into(memoryview(target))) is not None:
        await rest
    return bytes(target)


def no_more(word: bytes) -> int:
    return 0


def test_no_thread_is_woken_for_it() -> None:
    async def story(here: Counted, there: Counted) -> None:
        await here.write([b"four", b"more"])
        assert here.post(b"word") is None
        await asyncio.sleep(0.1)
        assert await there.read(4, lambda word: len(word)) == b"fourmore"
        assert await there.read(4, no_more) == b"word"
        assert (here.woken, there.woken) == (0, 0)
        assert await asyncio.gather(there.read(2, no_more), here.write([b"it"])) == [b"it", None]
        waiting = asyncio.create_task(filled(there, AT_ONCE_BYTES))
        for size_bytes in (10, AT_ONCE_BYTES - 10):
            await asyncio.sleep(0.1)
            await here.write([bytes(size_bytes)])
        assert await waiting == bytes(AT_ONCE_BYTES)
        assert there.woken == 0, "what is not there yet is waited for without one"
        await asyncio.gather(
            here.write([bytes(AT_ONCE_BYTES), b"and more"]), filled(there, AT_ONCE_BYTES + 8)
        )
        assert here.woken and there.woken, "what is long is the threads' work"

    played(story)


def test_what_the_kernel_does_not_take_at_once_follows_in_order() -> None:
    async def story(here: Counted, there: Counted) -> None:
        words = [bytes([number]) * (AT_ONCE_BYTES - 1000 * number) for number in range(6)]
        writes = [asyncio.create_task(here.write([word])) for word in words]
        await asyncio.sleep(0.2)
        assert not all(write.done() for write in writes) and here.woken
        for word in words:
            assert await filled(there, len(word)) == word
        await asyncio.gather(*writes)

    played(story)


def test_who_waits_in_line_gets_what_comes_in_order_whoever_reads_it() -> None:
    async def story(here: Counted, there: Counted) -> None:
        sizes = [4, AT_ONCE_BYTES + 1, 1000]
        waiting = [asyncio.create_task(filled(there, size)) for size in sizes]
        await asyncio.sleep(0.1)
        sent = b"".join(bytes([number]) * size for number, size in enumerate(sizes))
        await here.write([sent])
        for number, (size, one) in enumerate(zip(sizes, waiting, strict=True)):
            assert await one == bytes([number]) * size
        await here.write([b"word"])
        assert await there.read(4, no_more) == b"word"

    played(story)


@pytest.mark.parametrize("first", [b"", b"some"])
def test_what_is_promised_or_has_begun_and_stops_ends_the_line_in_time(
    first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall_s, steps = 0.5, 6
    monkeypatch.setattr(f"{__name__}.STALL_S", stall_s)

    async def story(here: Counted, there: Counted) -> None:
        promised = asyncio.create_task(
            filled(there, 100) if not first else there.read(100, no_more)
        )
        await here.write([first or b"s"])
        for _ in range(steps):  # a slow end is not silent
            await asyncio.sleep(stall_s / 2)
            await here.write([b"more"])
        assert not promised.done()
        with pytest.raises(TimeoutError, match=r"nothing moved for 0.5 s"):
            await asyncio.wait_for(asyncio.shield(promised), 3 * stall_s)
        with pytest.raises(OSError):
            await there.write([b"word"])

    played(story)


def test_nobody_is_hurried_who_promised_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.STALL_S", 0.2)

    async def story(here: Counted, there: Counted) -> None:
        waiting = asyncio.create_task(there.read(4, no_more))
        await asyncio.sleep(1)
        await here.write([b"word"])
        assert await waiting == b"word"

    played(story)


@pytest.mark.parametrize("ends", ["here", "there"])
def test_who_waits_for_a_line_that_ends_is_told(ends: str) -> None:
    async def story(here: Counted, there: Counted) -> None:
        waiting = [asyncio.create_task(filled(there, size)) for size in (4, 4)]
        await asyncio.sleep(0.1)
        (here if ends == "here" else there).close()
        for one in waiting:
            with pytest.raises((EOFError, OSError)):
                await asyncio.wait_for(one, 5)

    played(story)


def test_who_floods_a_line_leaves_others_their_turns() -> None:
    async def story(here: Counted, there: Counted) -> None:
        count, turns, is_over = 100, 0, False

        async def others() -> None:
            nonlocal turns
            while not is_over:
                turns += 1
                await asyncio.sleep(0)

        for _ in range(count):
            await here.write([b"word"])
        await asyncio.sleep(0.1)
        beside = asyncio.create_task(others())
        for _ in range(count):
            await there.read(4, no_more)
        assert there.woken == 0, "all was there"
        is_over = True
        await beside
        assert turns >= count

    played(story)


def test_a_line_for_which_no_thread_is_left_keeps_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def story(here: Counted, there: Counted) -> None:
        monkeypatch.setattr(threading.Thread, "start", none_left)
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="can't start new thread"):
            DirectLine(here._connection, STALL_S, lambda: None)
        assert len(os.listdir("/proc/self/fd")) == len(before)

    played(story)


class Kept:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def send(self, data: memoryview) -> int:
        self.sent += data
        return len(data)


def in_tiny_records(content: bytes) -> bytes:
    kept = Kept()
    sender = SealedSocket(cast(Any, kept), Keys(SECRET, b"out"), Keys(SECRET, b"back"))
    for number in range(len(content)):
        sender.send(content[number : number + 1])
    return bytes(kept.sent)


@pytest.mark.parametrize("comes_first", [True, False])
def test_who_cuts_a_frame_into_tiny_records_has_no_more_of_the_event_loop(
    comes_first: bool,
) -> None:
    """One frame may have 300,000 records of a byte, which held up the event loop for 0.8 s."""

    async def story(here: Counted, there: Counted) -> None:
        content, target = bytes(range(200)) * 10, bytearray(2000)
        connection = here._connection._connection
        if comes_first:
            connection.sendall(in_tiny_records(content))
        rest = there.read_into(memoryview(target))
        assert rest is not None, "all of them in one turn"
        reading = asyncio.ensure_future(rest)
        await asyncio.sleep(0)
        if not comes_first:
            connection.sendall(in_tiny_records(content))
            await asyncio.sleep(0.01)
        await asyncio.wait_for(reading, 5)
        assert target == content and there.woken, "the thread has read them"
        await there.write([b"word"])
        assert await here.read(4, no_more) == b"word"

    played(story)


class Later:
    """A turn that always gives way: somebody else goes first."""

    waits = 0

    def must_wait(self) -> bool:
        return True

    async def wait(self) -> None:
        self.waits += 1
        await asyncio.sleep(0.01)


def test_who_gives_way_gives_it_once_for_each_piece() -> None:
    """A lane of states to a newcomer got nothing through as long as others had something to send. A
    stream through libp2p sends a piece after each wait."""

    async def story(here: Counted, there: Counted) -> None:
        turn, target = Later(), bytearray(3 * PIECE_BYTES)
        words = [bytes([number]) * PIECE_BYTES for number in range(3)]
        reading = asyncio.create_task(there.read_into(memoryview(target)))
        async with asyncio.timeout(5):
            await here.write(words, turn)
            await reading
        assert target == b"".join(words)
        assert turn.waits == 3

    played(story)


def test_a_fault_in_what_is_there_is_told_and_the_line_is_open_still() -> None:
    def refused(word: bytes) -> int:
        raise PeerFault("so long a word")

    async def story(here: Counted, there: Counted) -> None:
        await here.write([b"word"])
        await asyncio.sleep(0.1)
        with pytest.raises(PeerFault, match="so long a word"):
            await there.read(4, refused)
        await here.write([b"next"])
        assert await there.read(4, no_more) == b"next"
        here.close()
        await asyncio.sleep(0.1)
        with pytest.raises((EOFError, ConnectionResetError)):
            await there.read(4, no_more)
        with pytest.raises(ConnectionResetError):
            await here.write([b"word"])
        with pytest.raises(OSError):
            await there.write([b"word"])

    played(story)


def test_a_record_that_was_taken_out_on_the_way_is_missed_though_the_next_one_fits() -> None:
    ours, theirs = socket.socketpair()
    sender = SealedSocket(ours, Keys(SECRET, b"out"), Keys(SECRET, b"back"))
    receiver = SealedSocket(theirs, Keys(SECRET, b"back"), Keys(SECRET, b"out"))
    sender.send(b"first")
    theirs.recv(1 << 12)
    sender.send(b"other")
    for _ in range(2):  # read by the caller at once, then by the thread
        with pytest.raises(ConnectionAbortedError):
            receiver.recv_into(memoryview(bytearray(5)))
