"""What is short, and can be sent or is there already, goes without the line's thread."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.direct.line import AT_ONCE_BYTES, DirectLine
from p2p_dtfm.net.direct.sealed import PIECE_BYTES, SECRET_BYTES, Keys, SealedSocket

SECRET = bytes(range(SECRET_BYTES)) * 2
STALL_S = 20.0


class Counted(DirectLine):
    """How often its thread was woken."""

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


def no_more(word: bytes) -> int:
    return 0


def test_no_thread_is_woken_for_it() -> None:
    async def story(here: Counted, there: Counted) -> None:
        await here.write([b"four", b"more"])
        await here.post(b"word")
        await asyncio.sleep(0.1)
        assert await there.read(4, lambda word: len(word)) == b"fourmore"
        assert await there.read(4, no_more) == b"word"
        assert (here.woken, there.woken) == (0, 0)
        assert await asyncio.gather(there.read(2, no_more), here.write([b"it"])) == [b"it", None]
        assert (here.woken, there.woken) == (0, 1), "what is not there yet is waited for"
        await asyncio.gather(
            here.write([bytes(AT_ONCE_BYTES), b"and more"]),
            there.read_into(memoryview(bytearray(AT_ONCE_BYTES + 8))),
        )
        assert here.woken and there.woken > 1, "what is long is the threads' work"

    played(story)


def test_what_the_kernel_does_not_take_at_once_follows_in_order() -> None:
    async def story(here: Counted, there: Counted) -> None:
        words = [bytes([number]) * (AT_ONCE_BYTES - 1000 * number) for number in range(6)]
        writes = [asyncio.create_task(here.write([word])) for word in words]
        await asyncio.sleep(0.2)
        assert not all(write.done() for write in writes) and here.woken
        for word in words:
            target = bytearray(len(word))
            await there.read_into(memoryview(target))
            assert target == word
        await asyncio.gather(*writes)

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


class Later:
    """Somebody else always goes first."""

    waits = 0

    def must_wait(self) -> bool:
        return True

    async def wait(self) -> None:
        self.waits += 1
        await asyncio.sleep(0.01)


def test_who_gives_way_gives_it_once_for_each_piece() -> None:
    """A lane of states to one who joins got nothing through as long as others had something to
    send, where a stream through libp2p has its piece after each wait."""

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
    for _ in range(2):  # by the caller at once, then by the thread
        with pytest.raises(ConnectionAbortedError):
            receiver.recv_into(memoryview(bytearray(5)))
