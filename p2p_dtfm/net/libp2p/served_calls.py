"""Calls that others make, each served as a stream that p2pd only passes on.

p2pd has a way of its own to serve calls, but there nothing bounds what strangers have it keep. If a
call is announced and never sent, p2pd holds all the announced bytes without end. Of calls with one
name, which the caller chooses, it keeps all answers but the last. A call looks the same as a
stream, so the caller notices nothing.
"""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from p2p_dtfm.net.hivemind_parts import PeerID, p2pd_pb2, p2pd_wire

NEAR_LIMIT_BYTES, CALL_LIMIT_BYTES = 4 << 20, (1 << 20) + 1024
"""The longest call, with its envelope, of a near peer and of any other. No kind of call is longer
than the second. A near peer is told when a call is too long."""
PATIENCE_S = 30.0
LEAST_BYTES_PER_S = 4096
"""The slowest rate at which a call, or an answer, may travel."""
NEAR_LIMIT_PER_PEER = 128
FAR_LIMIT, FAR_LIMIT_PER_PEER = 512, 32
FAR_LIMIT_BYTES = 32 << 20
"""The most bytes of calls and answers under way for all strangers and newcomers together. Beyond it
their oldest calls go."""

Handler = Callable[[bytes, PeerID], Awaitable[bytes]]
_VARINT_BITS = 32
_BROKEN = (EOFError, OSError, RuntimeError, TimeoutError, ValueError, DecodeError)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _ServedCall:
    sender: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    size_bytes: int = 0


class ServedCalls:
    """Serves calls in place of hivemind's client, for hivemind's own protocol as well.
    `is_near(sender)`: whether a sender's call is served however many strangers make some."""

    def __init__(self, p2p: Any, is_near: Callable[[str], bool]) -> None:
        self._p2p = p2p
        self._is_near = is_near
        self._near: collections.Counter[str] = collections.Counter()
        self._far: dict[_ServedCall, None] = {}
        """The calls of strangers and newcomers, the oldest first."""
        p2p._client.add_unary_handler = self.add_unary_handler
        p2p._client.remove_unary_handler = self.remove_unary_handler

    @property
    def count(self) -> int:
        """How many calls are served now."""
        return self._near.total() + len(self._far)

    async def add_unary_handler(self, name: str, handler: Handler, balanced: bool = False) -> None:
        await self._p2p.add_binary_stream_handler(name, partial(self._serve, handler), balanced)

    async def remove_unary_handler(self, name: str) -> None:
        await self._p2p.remove_binary_stream_handler(name)

    async def _serve(
        self,
        handler: Handler,
        info: Any,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        call = _ServedCall(info.peer_id.to_base58(), reader, writer)
        try:
            with self._place(call):
                request = await self._read(call)
                answer = await _answer(handler, request, info.peer_id)
                await self._give(call, answer)
        except _BROKEN as error:
            log.debug("a call of %s: %r", call.sender, error)
            writer.transport.abort()  # do not wait until anybody takes what was written
        finally:
            writer.close()

    @contextlib.contextmanager
    def _place(self, call: _ServedCall) -> Iterator[None]:
        sender, counts = call.sender, self._near
        if not self._is_near(sender):
            own = [it for it in self._far if it.sender == sender]
            if len(own) >= FAR_LIMIT_PER_PEER:
                self._drop(own[0])
            self._far[call] = None
            self._make_room()
            try:
                yield
            finally:
                self._far.pop(call, None)
            return
        if counts[sender] >= NEAR_LIMIT_PER_PEER:
            raise ValueError("too many at once")
        counts[sender] += 1
        try:
            yield
        finally:
            counts[sender] -= 1
            if not counts[sender]:
                del counts[sender]

    def _make_room(self) -> None:
        while len(self._far) > FAR_LIMIT or self._far_bytes() > FAR_LIMIT_BYTES:
            self._drop(next(iter(self._far)))

    def _far_bytes(self) -> int:
        return sum(call.size_bytes for call in self._far)

    def _drop(self, call: _ServedCall) -> None:
        del self._far[call]
        call.writer.transport.abort()

    def _takes(self, call: _ServedCall, size_bytes: int) -> float:
        """Note how many bytes are on their way now. Returns their deadline, by the event loop's
        clock."""
        call.size_bytes = size_bytes
        self._make_room()
        return asyncio.get_running_loop().time() + PATIENCE_S + size_bytes / LEAST_BYTES_PER_S

    async def _read(self, call: _ServedCall) -> Any:
        async with asyncio.timeout(PATIENCE_S) as limit:
            size_bytes = await p2pd_wire.read_unsigned_varint(call.reader, _VARINT_BITS)
            if size_bytes > (CALL_LIMIT_BYTES if call in self._far else NEAR_LIMIT_BYTES):
                raise ValueError(f"{size_bytes} bytes")
            limit.reschedule(self._takes(call, size_bytes))
            data = await call.reader.readexactly(size_bytes)
        return p2pd_pb2.PersistentConnectionRequest.FromString(data)

    async def _give(self, call: _ServedCall, answer: bytes) -> None:
        async with asyncio.timeout_at(self._takes(call, len(answer))):
            call.writer.write(answer)
            await call.writer.drain()
            await call.reader.read(1)  # until the other end closes: else what is left is lost


async def _answer(handler: Handler, request: Any, sender: PeerID) -> bytes:
    """The answer in p2pd's own form."""
    try:
        body = await handler(request.callUnary.data, sender)
        response = p2pd_pb2.CallUnaryResponse(response=body)
    except Exception as error:  # a stranger's bytes may raise anything
        log.debug("no answer", exc_info=True)
        response = p2pd_pb2.CallUnaryResponse(error=repr(error).encode())
    message = p2pd_pb2.PersistentConnectionRequest(callId=request.callId, unaryResponse=response)
    data = bytes(message.SerializeToString())
    return varint(len(data)) + data


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*found, number))
