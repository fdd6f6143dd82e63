"""Control calls: one question, one answer, a deadline, and nobody's bug takes the daemon down."""

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import BytesValue

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.door import BUSY, Leave
from p2p_dtfm.net.errors import NO_ANSWER, Refused, Unreachable, one_line
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.net.shaping import Shaper
from p2p_dtfm.ports import now, rarely

Handler = Callable[[str, bytes], Awaitable[bytes]]

BODY_LIMIT_BYTES = 1 << 20
MESSAGE_LIMIT_BYTES = BODY_LIMIT_BYTES + 32
"""The longest message: a body with its status, its envelope and, over emulated links, when it
left."""
AT_LEAST_S = 1.0
"""The least time left for each later part of a call, however long the earlier parts took. libp2p
refuses a call to an ended peer at once, which says more than silence. And a call that waited for a
narrow uplink must not make its line look dead."""
CONCURRENT_LIMIT = 256
CONCURRENT_LIMIT_PER_PEER = 64
_ANSWERED, _REFUSED = b"\x00", b"\x01"

log = logging.getLogger(__name__)


class CallWay(Protocol):
    """Another way than libp2p's, for those peers that have one."""

    async def call(self, peer_id: str, request: bytes, deadline_s: float) -> bytes | None:
        """The answer; None where libp2p is to carry the call. Raises `Unreachable` on silence."""
        ...


class ControlPlane:
    """Unary calls under one protocol name. `await ready()` before others may call.

    `handler(sender, body)` answers. A `PeerFault` that it raises reaches the caller as `Refused`.
    When the caller gives up, its handler here is left to finish.
    """

    def __init__(self, host: HostPort, handler: Handler, name: str = "control") -> None:
        self._host = host
        self._handler = handler
        self._kind = name
        self._name = f"/p2p-dtfm/1/{name}"
        self._serving: collections.Counter[str] = collections.Counter()
        self._tasks: set[asyncio.Task[bytes]] = set()
        self.way: CallWay | None = None
        """The way that is tried before libp2p."""

    async def ready(self) -> "ControlPlane":
        """Start to answer."""
        await self._host.serve_calls(self._name, self._serve)
        return self

    async def call(self, peer_id: str, body: bytes, deadline_s: float) -> bytes:
        """Ask a peer. Raises `Unreachable` on silence, `Refused` when it says no."""
        assert len(body) <= BODY_LIMIT_BYTES, f"a call of {len(body)} bytes"
        request = BytesValue(value=body).SerializeToString()
        if self._host.shaper is None:
            reply = await self._plain_call(peer_id, request, deadline_s)
        else:
            reply = await self._shaped_call(self._host.shaper, peer_id, request, deadline_s)
        return _open_reply(peer_id, reply)

    async def _plain_call(self, peer_id: str, request: bytes, deadline_s: float) -> bytes:
        ends_s = now.monotonic_s() + deadline_s
        if self.way is not None:
            reply = await self.way.call(peer_id, request, deadline_s)
            if reply is not None:
                return reply
        return await self._host.call(peer_id, self._name, request, _left_s(ends_s, deadline_s))

    async def _shaped_call(
        self, shaper: Shaper, peer_id: str, request: bytes, deadline_s: float
    ) -> bytes:
        """A call over an emulated link. The carrier itself notices silence, and gives up a line for
        it. So no further limit stands around the carrier's part."""
        ends_s = now.monotonic_s() + deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                request = await shaper.depart(peer_id, request)
            reply = await self._plain_call(peer_id, request, _left_s(ends_s, deadline_s))
            async with asyncio.timeout(_left_s(ends_s, deadline_s)):
                return await shaper.arrive(peer_id, reply)
        except TimeoutError as error:
            raise Unreachable(peer_id, f"{NO_ANSWER} {deadline_s:g} s") from error

    async def _serve(self, sender: str, request: bytes) -> bytes:
        begun = self.begin(sender, request)
        if isinstance(begun, bytes):
            return begun
        await asyncio.wait({begun})  # if this is cancelled, the handler still finishes
        return _reply(_REFUSED, BUSY.encode()) if begun.cancelled() else begun.result()

    def begin(self, sender: str, request: bytes) -> "bytes | asyncio.Task[bytes]":
        """The answer to a known sender's call, or the task that will have it, whichever way the
        call came."""
        full = self._serving.total() >= CONCURRENT_LIMIT
        full |= self._serving[sender] >= CONCURRENT_LIMIT_PER_PEER
        if full or rarely.happens("busy"):
            return _reply(_REFUSED, BUSY.encode())
        leave = self._host.door.enter(sender, self._kind, len(request))
        if isinstance(leave, str):
            return _reply(_REFUSED, leave.encode())
        self._serving[sender] += 1
        task = asyncio.create_task(self._answer(sender, request))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._finished(sender, done, leave))
        return task

    def _finished(self, sender: str, task: asyncio.Task[bytes], leave: Leave) -> None:
        leave()
        self._tasks.discard(task)
        self._serving[sender] -= 1
        if self._serving[sender] == 0:
            del self._serving[sender]

    async def _answer(self, sender: str, request: bytes) -> bytes:
        shaper = self._host.shaper
        if shaper is None:
            return await self._handle(sender, request)
        request = await shaper.arrive(sender, request)
        return await shaper.depart(sender, await self._handle(sender, request))

    async def _handle(self, sender: str, request: bytes) -> bytes:
        try:
            answer = await self._handler(sender, _body_of(request))
            assert len(answer) <= BODY_LIMIT_BYTES, f"an answer of {len(answer)} bytes"
            return _reply(_ANSWERED, answer)
        except PeerFault as fault:
            return _reply(_REFUSED, one_line(fault.cause).encode())
        except Unreachable as unreachable:
            return _reply(_REFUSED, one_line(str(unreachable)).encode())
        except Exception:
            # One bad answer must not end a daemon that trains; the log has the story.
            log.exception("bug while answering %s on %s", sender, self._name)
            return _reply(_REFUSED, b"internal error")

    async def close(self) -> None:
        """Stop the handlers that still run."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _left_s(ends_s: float, deadline_s: float) -> float:
    return min(deadline_s, max(ends_s - now.monotonic_s(), AT_LEAST_S))


def _body_of(request: bytes) -> bytes:
    if len(request) > MESSAGE_LIMIT_BYTES:
        raise PeerFault(f"a call of {len(request)} bytes, more than {BODY_LIMIT_BYTES}")
    try:
        return BytesValue.FromString(request).value
    except DecodeError as error:
        raise PeerFault("a call that is not in the agreed form") from error


def _reply(status: bytes, body: bytes) -> bytes:
    return BytesValue(value=status + body).SerializeToString()


def _open_reply(peer_id: str, reply: bytes) -> bytes:
    if len(reply) > MESSAGE_LIMIT_BYTES:
        raise Refused(f"an answer of {len(reply)} bytes, more than {BODY_LIMIT_BYTES}", peer_id)
    try:
        content = BytesValue.FromString(reply).value
    except DecodeError as error:
        raise Refused("an answer that is not in the agreed form", peer_id) from error
    status, body = content[:1], content[1:]
    if status == _ANSWERED:
        return body
    if status == _REFUSED:
        raise Refused(one_line(body.decode(errors="replace")), peer_id)
    raise Refused("an answer without a status", peer_id)
