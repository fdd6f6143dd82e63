"""One sealed connection, worked by a thread of its own, so that the event loop stays free.

The thread sends from the caller's memory and receives into it: nothing is copied here. It never
waits for one direction alone: while a write is held up, what comes is still read. With what is
short, and can be sent or is there already, it is not troubled: the caller does that at once.
"""

import asyncio
import collections
import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.direct.sealed import PIECE_BYTES, Bytes, SealedSocket

AT_ONCE_BYTES = 1 << 20
"""So much is sealed, sent, received and opened on the event loop, a millisecond's work. To wake a
thread and to be woken by it costs as much, each time with a turn of the interpreter's lock."""
POSTED_LIMIT = 64
"""Words that may wait to be written, with nobody waiting for them."""


class RightOfWay(Protocol):
    """Whether somebody goes first."""

    def must_wait(self) -> bool:
        """Asked from any thread."""

    async def wait(self) -> None:
        """Until nobody goes first, but not for long."""


class _Write:
    __slots__ = ("future", "pieces", "turn")

    def __init__(self, data: Sequence[Bytes], turn: RightOfWay | None) -> None:
        views = [memoryview(part) for part in data]
        self.pieces = collections.deque(
            view[start : start + PIECE_BYTES]
            for view in views
            for start in range(0, len(view), PIECE_BYTES)
        )
        self.turn = turn
        self.future: asyncio.Future[None] | None = None
        """Of who waits for it, if anybody does."""

    @property
    def is_short(self) -> bool:
        return sum(map(len, self.pieces)) <= AT_ONCE_BYTES


class _Read:
    __slots__ = ("filled", "future", "is_due", "rest_of", "target")

    def __init__(
        self,
        target: memoryview,
        is_due: bool,
        rest_of: Callable[[bytes], int] | None,
    ) -> None:
        self.target = target
        self.filled = 0
        self.is_due = is_due
        """Its sender has promised it; else it may take as long as it likes to begin."""
        self.rest_of = rest_of
        self.future: asyncio.Future[memoryview] | None = None

    def ask_for_the_rest(self) -> bool:
        """Whether there is more to be read, now that it is filled. Raises `PeerFault`."""
        if self.rest_of is None:
            return False
        rest_bytes, self.rest_of = self.rest_of(bytes(self.target)), None
        if rest_bytes:
            self.target = memoryview(bytearray(self.target) + bytes(rest_bytes))
        return rest_bytes > 0


class DirectLine:
    """A connection whose handshake is done. Used from the event loop that made it.

    Whatever goes wrong ends it: what waits raises `OSError`, `EOFError` or, where nothing moves
    for `stall_s` in the middle of something, `TimeoutError`.
    """

    def __init__(
        self, connection: SealedSocket, stall_s: float, on_end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._stall_ms = int(stall_s * 1000)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._writes: collections.deque[_Write] = collections.deque()
        self._reads: collections.deque[_Read] = collections.deque()
        self._closing = False
        self._gives_way = False
        self._gave_way = False
        """For the piece that is next: it goes, whoever is still before it."""
        self._rings = 0
        self._rests = False
        """The thread waits, or is about to, and must be woken."""
        self._lock = threading.Lock()
        """Held while `_ended` changes, the thread is woken, or the caller does its work."""
        self._ended: BaseException | None = None
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._thread = threading.Thread(target=self._work, name="direct line", daemon=True)
        self._thread.start()

    async def write(self, data: Sequence[Bytes], turn: RightOfWay | None = None) -> None:
        """Returns once all of it is on its way, and its memory is the caller's again."""
        job = _Write(data, turn)
        if self._sent_at_once(job):
            return
        job.future = future = self._loop.create_future()
        self._writes.append(job)
        self._wake(future)
        await future

    async def post(self, word: bytes) -> None:
        """Write a few bytes, without waiting for it unless many wait already."""
        if len(self._writes) >= POSTED_LIMIT:
            await self.write([word])
            return
        job = _Write([word], None)
        if not self._sent_at_once(job):
            self._writes.append(job)
            self._wake()

    async def read_into(self, target: memoryview) -> None:
        """Fill it with what the other side has promised."""
        await self._read(target, True, None)

    async def read(self, first_bytes: int, rest_of: Callable[[bytes], int]) -> memoryview:
        """So many bytes, whenever they come, and as many more as `rest_of` says of them. A
        `PeerFault` that it raises is raised here, and the line is open still."""
        return await self._read(memoryview(bytearray(first_bytes)), False, rest_of)

    async def _read(
        self, target: memoryview, is_due: bool, rest_of: Callable[[bytes], int] | None
    ) -> memoryview:
        job = _Read(target, is_due, rest_of)
        if self._received_at_once(job):
            await asyncio.sleep(0)  # or who floods the line would have every turn of the loop
            return job.target
        future: asyncio.Future[memoryview] = self._loop.create_future()
        job.future = future
        self._reads.append(job)
        self._wake(future)
        return await future

    def _sent_at_once(self, job: _Write) -> bool:
        """As much of it as the kernel takes; whether that was all. The thread sends nothing while
        no write waits, and finds out by itself what is wrong with the connection."""
        if self._writes or self._gives_way or not job.is_short:
            return False
        if job.turn is not None and job.turn.must_wait():
            return False
        with self._lock:
            if self._closing or self._ended is not None:
                return False
            try:
                while job.pieces:
                    self._connection.send(job.pieces[0])
                    job.pieces.popleft()
            except OSError:
                return False
        return True

    def _received_at_once(self, job: _Read) -> bool:
        """As much of it as is there; whether that was all. The thread reads nothing while no read
        waits. Raises `PeerFault`."""
        if self._reads or len(job.target) > AT_ONCE_BYTES:
            return False
        with self._lock:
            if self._closing or self._ended is not None:
                return False
            try:
                while job.filled < len(job.target):
                    count = self._connection.recv_into(job.target[job.filled :])
                    job.filled += count
                    if not count:
                        return False  # the end: the thread will see it, too
                    if job.filled == len(job.target):
                        job.ask_for_the_rest()
            except OSError:
                return False
        return True

    def round_trip_s(self) -> float | None:
        """Of the connection itself, however busy its ends are; None: not known."""
        return self._connection.round_trip_s()

    def close(self) -> None:
        """What waits raises; what was written and taken by the kernel still leaves."""
        self._closing = True
        self._ring()

    async def closed(self, deadline_s: float) -> None:
        """Wait for the thread, but not for ever."""
        await asyncio.to_thread(self._thread.join, deadline_s)

    def _wake(self, future: "asyncio.Future[Any] | None" = None) -> None:
        """Raises `ConnectionResetError` when the line has ended; nobody waits for `future` then."""
        if not self._ring():
            if future is not None:
                future.cancel()
            raise ConnectionResetError(str(self._ended) or repr(self._ended))

    def _ring(self) -> bool:
        """Let the thread look; False: it has ended."""
        self._rings += 1
        with self._lock:
            if self._ended is not None:
                return False
            if self._rests:
                with contextlib.suppress(BlockingIOError):  # full of such bytes: it will look
                    os.write(self._waking, b".")
            return True

    # the thread ----------------------------------------------------------------------------------

    def _work(self) -> None:
        ended: BaseException = ConnectionAbortedError("the line was closed here")
        try:
            while not self._closing:
                seen = self._rings
                wrote, blocked = self._write_some()
                read = self._read_some()
                if not wrote and not read:
                    self._rest(blocked, seen)
        except (OSError, EOFError) as failure:
            ended = failure
        finally:
            self._end(ended)

    def _write_some(self) -> tuple[bool, bool]:
        """Whether anything was written, and whether the kernel takes no more."""
        if not self._writes or self._gives_way:
            return False, False
        job = self._writes[0]
        if not self._gave_way and job.turn is not None and job.turn.must_wait():
            self._gives_way = True
            self._tell(self._give_way, job.turn)
            return False, False
        try:
            if job.pieces:
                self._connection.send(job.pieces[0])  # all of it or, by an exception, none
                job.pieces.popleft()
            self._gave_way = False
        except BlockingIOError:
            return False, True
        if not job.pieces:
            self._writes.popleft()
            self._tell(_settle, job.future, None)
        return True, False

    def _read_some(self) -> bool:
        """Whether anything was read."""
        if not self._reads:
            return False
        job, has_read = self._reads[0], False
        while job.filled < len(job.target):
            try:
                count = self._connection.recv_into(job.target[job.filled :])
            except BlockingIOError:
                return has_read
            if not count:
                raise EOFError("the other side closed the line")
            has_read = True
            job.filled += count
            if self._writes:
                break
        if job.filled == len(job.target):
            self._filled(job)
        return True

    def _filled(self, job: _Read) -> None:
        try:
            if job.ask_for_the_rest():
                return
        except PeerFault as fault:
            self._reads.popleft()
            self._tell(_settle, job.future, fault)
            return
        self._reads.popleft()
        self._tell(_settle, job.future, job.target)

    def _rest(self, blocked: bool, seen: int) -> None:
        """Wait for the socket or the event loop, unless it has rung since. Raises
        `TimeoutError`."""
        reads = self._reads[0] if self._reads else None
        events = (select.POLLIN if reads else 0) | (select.POLLOUT if blocked else 0)
        if events:
            self._poll.register(self._connection, events)
        is_due = blocked or (reads is not None and (reads.is_due or reads.filled > 0))
        self._rests = True  # from here on each ring writes; those before it are seen
        try:
            rung = self._rings != seen
            found = self._poll.poll(0 if rung else self._stall_ms if is_due else None)
        finally:
            self._rests = False
            if events:
                self._poll.unregister(self._connection)
        if not found and not rung:
            raise TimeoutError(f"nothing moved for {self._stall_ms / 1000:g} s")
        if any(descriptor == self._woken for descriptor, _ in found):
            os.read(self._woken, 1 << 12)

    def _end(self, ended: BaseException) -> None:
        with self._lock:
            self._ended = ended
            os.close(self._waking)
        os.close(self._woken)
        self._connection.close()
        jobs: list[_Write | _Read] = [*self._writes, *self._reads]
        for job in jobs:
            self._tell(_settle, job.future, ended)
        self._tell(self._on_end)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended, and with it everybody who waits
            self._closing = True

    # on the event loop again ---------------------------------------------------------------------

    def _give_way(self, turn: RightOfWay) -> None:
        waiting = self._loop.create_task(_wait(turn), name="gives way")
        waiting.add_done_callback(self._goes_on)

    def _goes_on(self, waiting: "asyncio.Task[None]") -> None:
        self._gave_way, self._gives_way = True, False
        self._ring()


async def _wait(turn: RightOfWay) -> None:
    await turn.wait()


def _settle(future: "asyncio.Future[Any] | None", outcome: object) -> None:
    if future is None or future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
