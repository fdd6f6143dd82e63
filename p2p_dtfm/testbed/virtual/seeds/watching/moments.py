"""Faults that begin when somebody says something. By the clock, they seldom fall between two words
that belong together.

A fault whose time has come waits for a message, and is done to an end of that message's way, or to
both. What parts the two ends is done before the message leaves. All else is done as it has left, or
a moment later; but some speakers die between two words of what they say to several. Some words are
late, and meanwhile something is done to an end of their way, or to somebody else.
"""

import contextvars
from collections.abc import Callable
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import BytesValue

from p2p_dtfm.core.messages.on_the_wire import Unreadable, tag_of
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import OF_LINKS, Fault
from p2p_dtfm.testbed.virtual.swarm import Swarm

PATIENCE_S = 4.0
"""If nobody sends the message for so long, the fault begins, and is done to whom the seed has
drawn."""


@dataclass(frozen=True)
class _Waiting:
    number: int
    fault: Fault
    until_s: float
    said: tuple[str, str] = ("", "")
    """Who has said the first of several words, and to whom."""


class Moments:
    """Waiting faults of one seed. `begin` is given a fault's number in the schedule, and the fault
    with the peers to which it is to be done."""

    def __init__(self, swarm: Swarm, begin: Callable[[int, Fault], None]) -> None:
        self._swarm = swarm
        self._begin = begin
        self._waiting: list[_Waiting] = []
        self._held: dict[tuple[str, str, str], float] = {}
        """Until when words are held, by speaker, hearer and kind."""
        self._coming = 0
        """How many faults begin in a moment."""

    def wait(self, number: int, fault: Fault) -> None:
        """Lets a fault wait for its message."""
        self._swarm.network.on_said = self._said
        self._waiting.append(_Waiting(number, fault, self._swarm.now_s + PATIENCE_S))

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._coming

    def give_up(self) -> None:
        """Gives up messages that nobody has sent: no word is late then."""
        for item in [it for it in self._waiting if it.until_s <= self._swarm.now_s]:
            self._waiting.remove(item)
            if item.fault.kind != "late word":
                self._begin(item.number, replace(item.fault, late_s=0.0))

    def _said(self, origin: str, goal: str, request: bytes) -> float | None:
        """How many seconds later the message leaves; None: never."""
        kind = kind_of(request) if self._waiting or self._held else ""
        for item in [it for it in self._waiting if it.fault.at_message == kind]:
            self._waiting.remove(item)
            if item.fault.late_s:
                self._held[origin, goal, kind] = self._swarm.now_s + item.fault.late_s
            if not self._comes(item, origin, goal):
                return None
        until_s = self._held.get((origin, goal, kind), 0.0)
        if until_s and until_s <= self._swarm.now_s:
            del self._held[origin, goal, kind]
        return max(0.0, until_s - self._swarm.now_s)

    def _comes(self, item: _Waiting, origin: str, goal: str) -> bool:
        """Begins a fault whose message is said. Returns whether the message still leaves."""
        names = {peer.peer_id: peer.name for peer in self._swarm.peers}
        ends = (names[origin], names[goal])
        if item.fault.is_of_goal:
            ends = ends[::-1]
        nobody = contextvars.Context()
        if item.fault.kind in OF_LINKS:
            nobody.run(self._begin, item.number, replace(item.fault, whom=ends))
            return True
        if item.fault.comes_before and not item.fault.is_of_goal:
            if self._is_first_word(item, origin, goal):
                return True
            nobody.run(self._begin, item.number, replace(item.fault, whom=ends[:1]))
            return not self._is_dead(ends[0])
        self._coming += 1
        whom = self._third(item.fault, ends) if item.fault.is_of_third else ends[0]
        fault = replace(item.fault, whom=(whom,))
        self._swarm.loop.call_later(fault.after_s, self._now, item.number, fault, context=nobody)
        return True

    def _third(self, fault: Fault, ends: tuple[str, str]) -> str:
        """The peer that the fault's draw chooses among others. Of two peers it is an end."""
        others = [it.name for it in self._swarm.peers if it.is_running and it.name not in ends]
        return others[int(fault.draw * len(others))] if others else ends[0]

    def _is_first_word(self, item: _Waiting, origin: str, goal: str) -> bool:
        """Whether this is the first of several words, or another peer's. If so, the fault waits
        on."""
        speaker, hearer = item.said
        is_second = speaker == origin and hearer != goal
        if not is_second:
            said = item.said if speaker else (origin, goal)
            self._waiting.append(replace(item, said=said))
        return not is_second

    def _is_dead(self, name: str) -> bool:
        return not self._swarm.named(name).is_running

    def _now(self, number: int, fault: Fault) -> None:
        self._coming -= 1
        self._begin(number, fault)


def kind_of(request: bytes) -> str:
    """The kind of a call of `net.libp2p.control`; empty: it has none."""
    try:
        return tag_of(BytesValue.FromString(request).value)
    except (DecodeError, Unreadable):
        return ""
