"""One sealed connection for calls: questions go one way, and answers the other.

    length u32 · number of the call u64 · the question, or the answer

Messages are small, so the event loop itself reads and writes them. Lanes have threads
(`net.direct.line`).
"""

import asyncio
import collections
import struct
from collections.abc import Callable

from p2p_dtfm.net.direct.sealed import PIECE_BYTES, SealedSocket
from p2p_dtfm.net.libp2p.control import MESSAGE_LIMIT_BYTES
from p2p_dtfm.ports import now

HEAD = struct.Struct(">IQ")
AT_ONCE = 32
"""Reads of a record, or of a part of one, before other tasks have their turn. They are the heads
and bodies of 16 short messages. A sender that cuts a long message small does not hold up the event
loop."""
UNSENT_LIMIT_BYTES = 4 * MESSAGE_LIMIT_BYTES
"""A peer that lets more than this wait is not listening."""


class CallLine:
    """Used from the event loop that made the line. Any failure ends the line, once."""

    def __init__(
        self,
        connection: SealedSocket,
        on_message: Callable[[int, bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """`on_message(number, body)` must not raise, and may close the line."""
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._unsent_bytes = 0
        self._waits_to_write = False
        self._number: int | None = None
        """The number of the message whose body is being read; None while a head is being read."""
        self._target = memoryview(bytearray(HEAD.size))
        self._filled = 0
        self._goes_on = False
        """The loop's next turn reads more, whatever the kernel says."""
        self.is_closed = False
        self.heard_s = now.monotonic_s()
        """When the line was made, or when the last message came."""
        self._descriptor = connection.fileno()
        self._loop.add_reader(self._descriptor, self._readable)

    def send(self, number: int, body: bytes) -> None:
        """Send without waiting. What is sent on a line that has ended is lost."""
        if self.is_closed:
            return
        assert len(body) <= MESSAGE_LIMIT_BYTES, f"a message of {len(body)} bytes"
        data = memoryview(HEAD.pack(len(body), number) + body)
        for start in range(0, len(data), PIECE_BYTES):
            self._unsent.append(data[start : start + PIECE_BYTES])
        self._unsent_bytes += len(data)
        if not self._waits_to_write:
            self._write()
        if self._unsent_bytes > UNSENT_LIMIT_BYTES:
            self.close()

    def close(self) -> None:
        """Close the line. What the kernel has taken still leaves."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._descriptor)
        if self._waits_to_write:
            self._loop.remove_writer(self._descriptor)
        self._unsent.clear()
        self._connection.close()
        self._on_end()

    def _write(self) -> None:
        try:
            while self._unsent:
                self._connection.send(self._unsent[0])  # all of the piece or, by an exception, none
                self._unsent_bytes -= len(self._unsent.popleft())
        except BlockingIOError:
            if not self._waits_to_write:
                self._waits_to_write = True
                self._loop.add_writer(self._descriptor, self._write)
            return
        except OSError:
            self.close()
            return
        if self._waits_to_write:
            self._waits_to_write = False
            self._loop.remove_writer(self._descriptor)

    def _readable(self) -> None:
        """Begin to read, unless a read is already due in the loop's next turn. The loop calls this
        in each turn in which something is there. Without the check, each turn of a flood would take
        longer than the one before."""
        if not self._goes_on:
            self._read()

    def _read(self) -> None:
        self._goes_on = False
        try:
            for _ in range(AT_ONCE):
                if self.is_closed:
                    return
                self._read_on()
        except BlockingIOError:
            return
        except (OSError, EOFError):
            self.close()
            return
        self._goes_on = True
        self._loop.call_soon(self._read)  # received bytes may wait here unopened

    def _read_on(self) -> None:
        if self._filled < len(self._target):
            count = self._connection.recv_into(self._target[self._filled :])
            if not count:
                raise EOFError("the other side closed the line")
            self._filled += count
        if self._filled == len(self._target):
            self._filled_up()

    def _filled_up(self) -> None:
        number, content = self._number, self._target
        self._filled = 0
        if number is None:
            length, self._number = HEAD.unpack(content)
            if length > MESSAGE_LIMIT_BYTES:
                raise ConnectionAbortedError(f"a message of {length} bytes")
            self._target = memoryview(bytearray(length))
        else:
            self._number, self._target = None, memoryview(bytearray(HEAD.size))
            self.heard_s = now.monotonic_s()
            self._on_message(number, bytes(content))
