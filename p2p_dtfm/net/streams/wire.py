"""The port between lanes and what carries them: a stream through libp2p, or a direct line.

Words (hellos, verdicts, counts, reasons) are a few bytes; frames are what the lanes are for. One
reader and, for frames, one writer at a time use a wire.
"""

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Protocol

from p2p_dtfm.net.direct.kernel_figures import KernelFigures
from p2p_dtfm.net.direct.line import DirectLine
from p2p_dtfm.net.direct.line_jobs import RightOfWay
from p2p_dtfm.net.errors import Refused, Unreachable, one_line
from p2p_dtfm.net.libp2p.port import HostPort, Writer
from p2p_dtfm.net.streams.bulk_settings import STRIPES_LIMIT
from p2p_dtfm.net.streams.frame_memory import FrameMemory
from p2p_dtfm.net.streams.frames import (
    PREFIX_BYTES,
    FrameHeader,
    FrameLimits,
    encode_frame,
    parse_header,
    parse_prefix,
    patience_s,
    read_frame,
)

Admit = Callable[[FrameHeader], Awaitable[None]]
DIRECT_STRIPES_LIMIT = 4
_WRITE_BYTES = 1 << 18
_JOINED_BYTES = 1 << 14
_STREAM_BUFFER_BYTES = 1 << 20
_WAITING_BYTES = 1 << 16
_OFF_LOOP_BYTES = 1 << 20
_LINGER_S = 2.0
_REASON_LIMIT_BYTES = 1024
LENGTH = struct.Struct(">H")
"""The length of a hello, or of a reason."""


class Wire(Protocol):
    """One stream of a lane. A break raises one of `CONNECTION_ERRORS`, or `TimeoutError`."""

    seals: bool
    """Whether all that arrives is what was sent, to the bit, so that frames need no checksum."""

    def round_trip_s(self) -> float | None:
        """The round trip of the connection itself, however busy its ends are; None where not
        known."""
        ...

    def is_held_back(self) -> bool | None:
        """Whether buffers or losses have held the stream back since this was last asked. If so,
        another stream beside it may carry more. None where not known."""
        ...

    async def read(self, size_bytes: int) -> bytes:
        """Read a word of exactly `size_bytes`, whenever it comes."""
        ...

    def write(self, word: bytes) -> Awaitable[None] | None:
        """Write a word. Returns what to wait for, until few words wait to be written; None for
        nothing."""

    async def read_frame(
        self, limits: FrameLimits, stall_s: float, admit: Admit
    ) -> tuple[FrameHeader, bytearray] | None:
        """The next frame, or None at a clean end. `admit` sees each header before memory is taken
        for what follows it; it may wait, or raise. Raises `PeerFault` for a wrong frame."""
        ...

    async def write_frame(
        self, start: bytes, payload: memoryview, turn: RightOfWay, stall_s: float
    ) -> None:
        """Write a frame. Once this returns, the payload's memory is the caller's again. Other lanes
        go first where `turn` says so."""

    async def rest(self) -> None:
        """Read and discard until the other side has closed."""

    def close(self) -> None: ...


async def written(waiting: Awaitable[None] | None) -> None:
    """Wait for what `Wire.write` has returned."""
    if waiting is not None:
        await waiting


class StreamWire:
    """A stream through libp2p."""

    seals = False

    def __init__(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        self.reader = reader
        self.writer = writer
        self._is_halfway = False
        """A part of a payload was written, and did not leave whole."""

    def round_trip_s(self) -> float | None:
        return None

    def is_held_back(self) -> bool | None:
        return None

    async def read(self, size_bytes: int) -> bytes:
        return await self.reader.readexactly(size_bytes)

    def write(self, word: bytes) -> Awaitable[None]:
        self.writer.write(word)
        return self.writer.drain()

    async def read_frame(
        self, limits: FrameLimits, stall_s: float, admit: Admit
    ) -> tuple[FrameHeader, bytearray] | None:
        async def admit_narrowly(header: FrameHeader) -> None:
            _narrow(self.reader)
            await admit(header)
            widen(self.reader)

        widen(self.reader)
        try:
            return await read_frame(self.reader, limits, stall_s, admit_narrowly)
        finally:  # whoever takes the frame may be slow
            _narrow(self.reader)

    async def write_frame(
        self, start: bytes, payload: memoryview, turn: RightOfWay, stall_s: float
    ) -> None:
        # a drain then means that nothing refers to the caller's payload any more
        self.writer.transport.set_write_buffer_limits(high=0)
        first = min(payload.nbytes, _JOINED_BYTES)  # small frames in one write
        await self._write_piece(start + payload[:first], turn, stall_s)
        for offset in range(first, payload.nbytes, _WRITE_BYTES):
            await self._write_piece(payload[offset : offset + _WRITE_BYTES], turn, stall_s)

    async def _write_piece(
        self, piece: bytes | memoryview, turn: RightOfWay, stall_s: float
    ) -> None:
        await turn.wait()
        if self.writer.is_closing():
            raise ConnectionResetError("the stream was closed")
        self._is_halfway = True
        self.writer.write(piece)
        async with asyncio.timeout(stall_s):
            await self.writer.drain()
        self._is_halfway = False

    async def rest(self) -> None:
        while await self.reader.read(_WRITE_BYTES):
            pass

    def close(self) -> None:
        if self._is_halfway and isinstance(self.writer, asyncio.StreamWriter):
            # uvloop holds the caller's own memory, and would send whatever is put there now
            self.writer.transport.abort()
        self.writer.close()


class LineWire:
    """A stream over a direct line."""

    seals = True

    def __init__(self, line: DirectLine, memory: FrameMemory | None = None) -> None:
        """`memory`: where frames that come over the line are put."""
        self.line = line
        self._memory = memory or FrameMemory(0)
        self._before = KernelFigures(None)

    def round_trip_s(self) -> float | None:
        figures = self.line.figures()
        return None if figures is None else figures.round_trip_s

    def is_held_back(self) -> bool | None:
        figures, before = self.line.figures(), self._before
        if figures is None:
            return None
        self._before = figures
        return figures.is_held_back_since(before)

    async def read(self, size_bytes: int) -> bytes:
        return bytes(await self.line.read(size_bytes, _nothing_more))

    def write(self, word: bytes) -> Awaitable[None] | None:
        return self.line.post(word)

    async def read_frame(
        self, limits: FrameLimits, stall_s: float, admit: Admit
    ) -> tuple[FrameHeader, bytearray] | None:
        try:
            head = await self.line.read(PREFIX_BYTES, parse_prefix)
        except EOFError:
            return None
        header = parse_header(bytes(head[PREFIX_BYTES:]), limits)
        await admit(header)
        payload = self._memory.take(header.following_bytes)
        if (rest := self.line.read_into(memoryview(payload))) is not None:
            async with asyncio.timeout(patience_s(stall_s, len(payload))):
                await rest
        return header, payload

    async def write_frame(
        self, start: bytes, payload: memoryview, turn: RightOfWay, stall_s: float
    ) -> None:
        first = min(payload.nbytes, _JOINED_BYTES)
        await self.line.write((start + payload[:first], payload[first:]), turn)

    async def rest(self) -> None:
        room = memoryview(bytearray(_JOINED_BYTES))
        while True:
            await (self.line.read_into(room) or asyncio.sleep(0))

    def close(self) -> None:
        self.line.close()


def _nothing_more(word: bytes) -> int:
    return 0


def widen(reader: asyncio.StreamReader) -> None:
    """Let a stream buffer as much as one read takes, or each read pauses and resumes the socket."""
    reader._limit = _STREAM_BUFFER_BYTES  # type: ignore[attr-defined]


def _narrow(reader: asyncio.StreamReader) -> None:
    """Bound what comes while a frame waits to be let in, or to be taken, since that counts in no
    budget. The bound is twice the limit, plus one read of the socket. If no frame waits, nothing
    comes before the stream is wide again."""
    reader._limit = _WAITING_BYTES  # type: ignore[attr-defined]


class Way(Protocol):
    """Makes new wires."""

    is_direct: bool
    most_stripes: int

    async def open(self, peer_id: str, protocol: str, deadline_s: float) -> Wire:
        """Open a wire to a peer. Raises `Unreachable`."""
        ...


class StreamWay:
    """Opens streams of a host."""

    is_direct = False
    most_stripes = STRIPES_LIMIT

    def __init__(self, host: HostPort) -> None:
        self._host = host

    async def open(self, peer_id: str, protocol: str, deadline_s: float) -> Wire:
        return StreamWire(*await self._host.open_stream(peer_id, protocol, deadline_s))


class LinesPort(Protocol):
    """What lanes need of `net.direct.lines.DirectLines`."""

    async def ready(self, accept: Callable[[str, DirectLine], None]) -> None: ...

    def wants(self, peer_id: str) -> bool: ...

    def works(self, peer_id: str) -> bool: ...

    async def open(self, peer_id: str) -> DirectLine:
        """Open a line to a peer. Raises `Unreachable`."""
        ...

    def broke(self, peer_id: str) -> None: ...

    def let_nobody_in(self, peer_id: str) -> None: ...

    async def close(self) -> None: ...


class LineWay:
    """Opens direct lines."""

    is_direct = True
    most_stripes = DIRECT_STRIPES_LIMIT

    def __init__(self, lines: LinesPort) -> None:
        self._lines = lines

    async def open(self, peer_id: str, protocol: str, deadline_s: float) -> Wire:
        try:
            async with asyncio.timeout(deadline_s):
                return LineWire(await self._lines.open(peer_id))
        except TimeoutError as error:
            raise Unreachable(peer_id, f"no direct line within {deadline_s:g} s") from error


async def start_of(header: FrameHeader, payload: memoryview, with_checksum: bool) -> bytes:
    """The bytes before the payload. Computed in a thread for large tensors, whose checksum takes
    milliseconds."""
    if with_checksum and payload.nbytes >= _OFF_LOOP_BYTES:
        return (await asyncio.to_thread(encode_frame, header, payload))[1]
    return encode_frame(header, payload, with_checksum)[1]


async def read_reason(wire: Wire, peer_id: str) -> Refused:
    """The reason that a peer gives when it hangs up."""
    async with asyncio.timeout(_LINGER_S):
        (length,) = LENGTH.unpack(await wire.read(LENGTH.size))
        text = await wire.read(min(length, _REASON_LIMIT_BYTES))
    return Refused(one_line(text.decode(errors="replace")), peer_id)
