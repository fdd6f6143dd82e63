"""Calls to peers that are called often, over lines of their own. libp2p would carry each call as a
stream, which two more processes open, agree on and close again.

A peer that calls another often makes a line to it, and asks there. libp2p carries the calls until
the line is there, and those that an ended line has left unanswered. It also carries all calls to
peers without a direct line.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.direct.call_line import CallLine
from p2p_dtfm.net.direct.sealed import SealedSocket
from p2p_dtfm.net.errors import NO_ANSWER, Unreachable
from p2p_dtfm.ports import now

OFTEN_CALLS, OFTEN_S = 16, 10.0
"""This many calls in this many seconds are worth a line."""
LINES_LIMIT = 128
"""The most lines in each direction. Each takes a descriptor."""
FROM_ONE_LIMIT = 2
"""A peer that has lost its line makes a new one before this end has noticed the loss."""
IDLE_S = 60.0
AFTER_AN_END_S, RARELY_S = 5.0, 300.0
"""How long after the end of a line a new one is made. The wait starts at the first value. It
doubles, up to the second, each time that nothing was answered on the line: the peer may have no
room for lines, and new keys cost both ends."""
PEERS_REMEMBERED = 4096

Answer = Callable[[str, bytes], "bytes | asyncio.Task[bytes]"]
log = logging.getLogger(__name__)


class ConnectionsPort(Protocol):
    """What `CallLines` needs of `net.direct.lines.DirectLines`."""

    def wants_calls(self, peer_id: str) -> bool: ...

    async def connection(self, peer_id: str) -> SealedSocket:
        """Raises `Unreachable`."""
        ...


@dataclass
class _Calls:
    """The latest calls to one peer."""

    since_s: float
    count: int = 0
    not_before_s: float = 0.0
    in_vain: int = 0
    """Lines in a row on which nothing was answered."""

    def are_often(self, now_s: float) -> bool:
        """Count one more call, and say whether the calls are often enough for a line."""
        if now_s - self.since_s > OFTEN_S:
            self.since_s, self.count = now_s, 0
        self.count += 1
        return self.count >= OFTEN_CALLS and now_s >= self.not_before_s

    def line_ended(self, was_of_use: bool, now_s: float) -> None:
        if was_of_use:
            self.in_vain = 0
        self.count = 0
        self.not_before_s = now_s + min(AFTER_AN_END_S * 2**self.in_vain, RARELY_S)
        if not was_of_use:
            self.in_vain = min(self.in_vain + 1, 16)


@dataclass(eq=False)
class _Asking:
    """A line on which this peer asks."""

    line: CallLine
    used_s: float
    asked: int = 0
    given_up: int = 0
    """Calls that were given up, and whose answers may still come."""
    is_of_use: bool = False
    waiting: "dict[int, asyncio.Future[bytes | None]]" = field(default_factory=dict)


class CallLines:
    """All lines for calls of one run. `take` is given those that others open."""

    def __init__(
        self, lines: ConnectionsPort, answer: Answer, is_near: Callable[[str], bool]
    ) -> None:
        """`answer(sender, request)` returns the answer, or a task that will have it. `is_near` says
        whether a sender's lines may stay."""
        self._lines = lines
        self._answer = answer
        self._is_near = is_near
        self._calls: dict[str, _Calls] = {}
        self._asking: dict[str, _Asking] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._come: dict[CallLine, str] = {}
        self._is_closed = False

    async def call(self, peer_id: str, request: bytes, deadline_s: float) -> bytes | None:
        """The answer; None where libp2p is to carry the call. Raises `Unreachable` on silence."""
        asking, now_s = self._asking.get(peer_id), now.monotonic_s()
        if asking is None:
            self._consider(peer_id, now_s)
            return None
        asking.asked, asking.used_s = asking.asked + 1, now_s
        number = asking.asked
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        asking.waiting[number] = answer
        asking.line.send(number, request)
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as error:
            if asking.line.heard_s <= now_s:
                asking.line.close()  # the line itself may be dead; libp2p has its own
            raise Unreachable(peer_id, f"{NO_ANSWER} {deadline_s:g} s") from error
        finally:
            if asking.waiting.pop(number, None) is not None:
                asking.given_up += 1

    def is_direct(self, peer_id: str) -> bool:
        """Whether a line carries the calls to a peer."""
        return peer_id in self._asking

    def take(self, peer_id: str, connection: SealedSocket) -> None:
        """Serve calls on a line that TLS has let in."""
        for line in [line for line, whose in self._come.items() if not self._is_near(whose)]:
            line.close()
        its = [line for line, whose in self._come.items() if whose == peer_id]
        if len(its) >= FROM_ONE_LIMIT:
            its[0].close()
        if len(self._come) >= LINES_LIMIT:
            idle = min(self._come, key=lambda line: line.heard_s)
            if now.monotonic_s() - idle.heard_s >= IDLE_S:
                idle.close()
        if self._is_closed or len(self._come) >= LINES_LIMIT:
            connection.close()
            return

        def asked(number: int, request: bytes) -> None:
            if not self._is_near(peer_id):
                line.close()  # the sender hears the reason through libp2p, as others do
                return
            begun = self._answer(peer_id, request)
            if isinstance(begun, bytes):
                line.send(number, begun)
            else:
                begun.add_done_callback(lambda task: answered(number, task))

        def answered(number: int, task: "asyncio.Task[bytes]") -> None:
            if not task.cancelled() and task.exception() is None:
                line.send(number, task.result())

        def ended() -> None:
            del self._come[line]

        line = CallLine(connection, asked, ended)
        self._come[line] = peer_id

    def close(self) -> None:
        """End all lines. libp2p then carries the calls that wait."""
        self._is_closed = True
        for opening in self._opening.values():
            opening.cancel()
        for asking in list(self._asking.values()):
            asking.line.close()
        for line in list(self._come):
            line.close()

    # lines to others -----------------------------------------------------------------------------

    def _consider(self, peer_id: str, now_s: float) -> None:
        calls = self._calls.get(peer_id) or _Calls(now_s)
        put_newest(self._calls, peer_id, calls, PEERS_REMEMBERED)
        if not calls.are_often(now_s) or self._is_closed or peer_id in self._opening:
            return
        self._let_go_idle(now_s)
        if len(self._asking) + len(self._opening) < LINES_LIMIT and self._lines.wants_calls(
            peer_id
        ):
            opening = asyncio.create_task(self._open(peer_id, calls), name="a line for calls")
            self._opening[peer_id] = opening
            opening.add_done_callback(lambda done: self._opening.pop(peer_id, None))

    def _let_go_idle(self, now_s: float) -> None:
        for asking in list(self._asking.values()):
            if not asking.waiting and now_s - asking.used_s >= IDLE_S:
                asking.line.close()

    async def _open(self, peer_id: str, calls: _Calls) -> None:
        try:
            connection = await self._lines.connection(peer_id)
        except Unreachable as error:
            log.debug("calls to %s stay with libp2p: %s", peer_id, error)
            return

        def heard(number: int, answer: bytes) -> None:
            waiting = asking.waiting.pop(number, None)
            if waiting is None:
                asking.given_up -= 1
                if asking.given_up < 0:  # an answer to no call: nothing else bounds these
                    asking.line.close()
                return
            asking.is_of_use = True
            if not waiting.done():
                waiting.set_result(answer)

        def ended() -> None:
            del self._asking[peer_id]
            calls.line_ended(asking.is_of_use, now.monotonic_s())
            for waiting in asking.waiting.values():
                if not waiting.done():
                    waiting.set_result(None)

        asking = _Asking(CallLine(connection, heard, ended), now.monotonic_s())
        self._asking[peer_id] = asking
