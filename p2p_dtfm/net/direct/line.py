"""One sealed connection. A thread of its own does the long work, so that the event loop stays free.

The thread sends from the caller's memory and receives into it: nothing is copied here. It never
waits for one direction alone: while a write is held up, the thread still reads what comes. Short
reads and writes do without the thread. The caller sends a short write at once where it can, and the
event loop waits for a short read and receives it.
"""

import asyncio
import collections
import contextlib
import errno
import os
import select
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.direct.kernel_figures import KernelFigures
from p2p_dtfm.net.direct.line_jobs import LineRead, LineWrite, RightOfWay
from p2p_dtfm.net.direct.sealed import Bytes, SealedSocket

AT_ONCE_BYTES = 1 << 20
"""So many bytes are sealed, sent, received and opened on the event loop, a millisecond's work. To
wake a thread and be woken by it costs a part of that, and a turn of the interpreter's lock each
time."""
AT_ONCE_RECORDS = 16
"""Records opened on the event loop for one read. What this program sends in so many records is far
longer. A sender that cuts smaller records would keep the loop for seconds, so the thread opens
them."""
POSTED_LIMIT = 64
"""Words that may wait to be written while no caller waits for them."""


class DirectLine:
    """A connection whose handshake is done. Used from the event loop that made it.

    Any failure ends the line. Reads and writes that wait then raise `OSError`, `EOFError` or, where
    nothing moves for `stall_s` in the middle of something, `TimeoutError`.
    """

    def __init__(
        self, connection: SealedSocket, stall_s: float, on_end: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._stall_ms = int(stall_s * 1000)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._writes: collections.deque[LineWrite] = collections.deque()
        self._reads: collections.deque[LineRead] = collections.deque()
        """The reads that the thread does."""
        self._waiting: LineRead | None = None
        """The read that the event loop does itself; None while the thread has any."""
        self._descriptor = connection.fileno()
        self._listens = False
        """Whether the event loop reports when something is there."""
        self._moved_s = 0.0
        """When the last bytes came for the read that the event loop waits for."""
        self._looking: asyncio.TimerHandle | None = None
        self._closing = False
        self._gives_way = False
        self._gave_way = False
        """Whether the line has given way for the next piece. That piece then goes, whoever is still
        before it."""
        self._rings = 0
        self._rests = False
        """Whether the thread waits, or is about to, and must be woken."""
        self._lock = threading.Lock()
        """Held while `_ended` changes, the thread is woken, or the caller does its work."""
        self._why: BaseException = ConnectionAbortedError("the line was closed here")
        self._ended: BaseException | None = None
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._thread = threading.Thread(target=self._work, name="direct line", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the process has as many threads as it may
            os.close(self._woken)
            os.close(self._waking)
            raise OSError(errno.EAGAIN, str(error)) from error

    async def write(self, data: Sequence[Bytes], turn: RightOfWay | None = None) -> None:
        """Write `data`, and return once all of it is on its way. Its memory is then the caller's
        again."""
        job = LineWrite(data, turn)
        if self._sent_at_once(job):
            return
        job.future = future = self._loop.create_future()
        self._writes.append(job)
        self._wake(future)
        await future

    def post(self, word: bytes) -> Awaitable[None] | None:
        """Write a few bytes. Returns what the caller has to wait for, which is None unless many
        words wait."""
        if len(self._writes) >= POSTED_LIMIT:
            return self.write([word])
        job = LineWrite([word], None)
        if not self._sent_at_once(job):
            self._writes.append(job)
            self._wake()
        return None

    def read_into(self, target: memoryview) -> Awaitable[object] | None:
        """Fill `target` with what the other side has promised. Returns what the caller has to wait
        for, if not all of that is here."""
        job = LineRead(target, True, None)
        is_here = self._received(job)
        return None if is_here else self._rest_of(job, is_here)

    async def read(self, first_bytes: int, rest_of: Callable[[bytes], int]) -> memoryview:
        """Read `first_bytes`, whenever they come, and then as many more as `rest_of` says of them.
        A `PeerFault` from `rest_of` is raised here, and the line stays open."""
        job = LineRead(memoryview(bytearray(first_bytes)), False, rest_of)
        is_here = self._received(job)
        if not is_here:
            return await self._rest_of(job, is_here)
        await asyncio.sleep(0)  # or a flood on the line would take every turn of the loop
        return job.target

    async def _rest_of(self, job: LineRead, is_short: bool | None) -> memoryview:
        future: asyncio.Future[memoryview] = self._loop.create_future()
        job.future = future
        if is_short is None:
            self._leave_to_the_thread(job)
        else:
            self._wait_for(job)
        return await future

    def _sent_at_once(self, job: LineWrite) -> bool:
        """Send as much as the kernel takes, and say whether that was all. The thread sends nothing
        while no write waits in its queue, and finds out by itself what is wrong with the
        connection."""
        if self._writes or self._gives_way or job.size_bytes > AT_ONCE_BYTES:
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

    def _received(self, job: LineRead) -> bool | None:
        """Receive as much as is there, and say whether that was all. None leaves the read to the
        thread: it is long, or comes in too many records, or others are before it, or the connection
        has failed. The thread reads nothing while no read is left to it, and finds failures itself.
        Raises `PeerFault`."""
        if self._reads or self._waiting not in (None, job) or len(job.target) > AT_ONCE_BYTES:
            return None
        with self._lock:
            if self._closing or self._ended is not None:
                return None
            try:
                for _ in range(AT_ONCE_RECORDS):
                    if job.filled == len(job.target):
                        return True
                    count = self._connection.recv_into(job.target[job.filled :])
                    job.filled += count
                    if not count:
                        return None  # the end: the thread will see it, too
                    if job.filled == len(job.target):
                        job.ask_for_the_rest()
            except BlockingIOError:
                return False
            except OSError:
                return None
        return True if job.filled == len(job.target) else None

    def _wait_for(self, job: LineRead) -> None:
        self._waiting, self._moved_s = job, self._loop.time()
        if not self._listens:
            self._loop.add_reader(self._descriptor, self._readable)
            self._listens = True
        if self._looking is None and job.is_under_way:
            self._looking = self._loop.call_later(self._stall_ms / 1000, self._look)

    def _readable(self) -> None:
        job = self._waiting
        if job is None or job.future is None or job.future.done():
            self._waiting = None  # nobody waits for what is there now
            self._stop_listening()
            return
        filled = job.filled
        try:
            is_here = self._received(job)
        except PeerFault as fault:
            self._waiting = None
            _settle(job.future, fault)
            return
        if is_here:
            self._waiting = None
            _settle(job.future, job.target)
        elif is_here is None:
            self._leave_to_the_thread()
        elif job.filled > filled:
            self._wait_for(job)

    def _look(self) -> None:
        """End the line if what has begun to come, or is promised, no longer moves."""
        self._looking, job = None, self._waiting
        if job is None or not job.is_under_way:
            return
        left_s = self._moved_s + self._stall_ms / 1000 - self._loop.time()
        if left_s > 0:
            self._looking = self._loop.call_later(left_s, self._look)
        else:
            self._why = self._stalled()
            self.close()

    def _leave_to_the_thread(self, job: LineRead | None = None) -> None:
        """Hand the read that the event loop waits for to the thread, and `job` after it."""
        jobs = [one for one in (self._waiting, job) if one is not None]
        self._waiting = None
        self._stop_listening()
        self._reads.extend(jobs)
        if not self._ring():
            for one in jobs:
                _settle(one.future, self._broken())

    def _stop_listening(self) -> None:
        if self._listens:
            self._listens = False
            self._loop.remove_reader(self._descriptor)

    def figures(self) -> KernelFigures | None:
        """The kernel's figures of the connection itself, however busy its ends are; None where not
        known."""
        return self._connection.figures()

    def close(self) -> None:
        """Close the line: reads and writes that wait raise. What the kernel has taken still
        leaves."""
        self._closing = True
        self._stop_listening()
        self._ring()

    async def closed(self, deadline_s: float) -> None:
        """Wait for the thread, but not for ever."""
        await asyncio.to_thread(self._thread.join, deadline_s)

    def _wake(self, future: "asyncio.Future[Any] | None" = None) -> None:
        """Wake the thread. If the line has ended, cancel `future` and raise
        `ConnectionResetError`."""
        if not self._ring():
            if future is not None:
                future.cancel()
            raise self._broken()

    def _broken(self) -> ConnectionResetError:
        return ConnectionResetError(str(self._ended) or repr(self._ended))

    def _stalled(self) -> TimeoutError:
        return TimeoutError(f"nothing moved for {self._stall_ms / 1000:g} s")

    def _ring(self) -> bool:
        """Let the thread look for work. False if the line has ended."""
        self._rings += 1
        with self._lock:
            if self._ended is not None:
                return False
            if self._rests:
                with contextlib.suppress(BlockingIOError):  # full: the thread will look
                    os.write(self._waking, b".")
            return True

    # the thread ----------------------------------------------------------------------------------

    def _work(self) -> None:
        ended: BaseException | None = None
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
            self._end(ended or self._why)

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
                self._connection.send(job.pieces[0])  # all of the piece or, by an exception, none
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

    def _filled(self, job: LineRead) -> None:
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
        """Wait for the socket or for the event loop's ring, unless it has rung since `seen`. Raises
        `TimeoutError`."""
        reads = self._reads[0] if self._reads else None
        events = (select.POLLIN if reads else 0) | (select.POLLOUT if blocked else 0)
        if events:
            self._poll.register(self._connection, events)
        is_due = blocked or (reads is not None and reads.is_under_way)
        self._rests = True  # from here on each ring writes a byte; earlier ones are counted
        try:
            rung = self._rings != seen
            found = self._poll.poll(0 if rung else self._stall_ms if is_due else None)
        finally:
            self._rests = False
            if events:
                self._poll.unregister(self._connection)
        if not found and not rung:
            raise self._stalled()
        if any(descriptor == self._woken for descriptor, _ in found):
            os.read(self._woken, 1 << 12)

    def _end(self, ended: BaseException) -> None:
        with self._lock:
            self._ended = ended
            os.close(self._waking)
        os.close(self._woken)
        jobs: list[LineWrite | LineRead] = [*self._writes, *self._reads]
        for job in jobs:
            self._tell(_settle, job.future, ended)
        if not self._tell(self._over):
            self._connection.close()

    def _tell(self, function: Callable[..., None], *arguments: object) -> bool:
        """Call a function on the event loop. False if the loop has ended, and with it everybody who
        waits."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            self._closing = True
            return False
        return True

    # on the event loop again ---------------------------------------------------------------------

    def _over(self) -> None:
        """Stop listening before the descriptor becomes another connection's, and tell all who
        wait."""
        self._stop_listening()
        if self._looking is not None:
            self._looking.cancel()
        self._connection.close()
        if self._waiting is not None:
            _settle(self._waiting.future, self._ended)
        self._on_end()

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
