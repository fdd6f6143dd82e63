"""Faults that begin when somebody says something: by the clock they seldom fall between two words
that belong together.

Of a fault whose time has come and that waits for a message, those to whom it is done are the ends
of that message's way. What parts them is done before it leaves, all else as it has left, or a
moment later; but some die between two words of what they say to several. Some words are late, and
what is done meanwhile is done to an end of their way, or to somebody else.
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
"""A fault whose message is not sent begins then, and is done to whom the seed has drawn."""


@dataclass(frozen=True)
class _Waiting:
    number: int
    fault: Fault
    until_s: float
    said: tuple[str, str] = ("", "")
    """Who has said the first of several words, and to whom."""


class Moments:
    """Of one seed. `begin` is given a fault's number in the schedule, and it with those to whom it
    is to be done."""

    def __init__(self, swarm: Swarm, begin: Callable[[int, Fault], None]) -> None:
        self._swarm = swarm
        self._begin = begin
        self._waiting: list[_Waiting] = []
        self._held: dict[tuple[str, str, str], float] = {}
        """Until when: what is said from whom to whom, of what kind."""
        self._coming = 0
        """Begin in a moment."""

    def wait(self, number: int, fault: Fault) -> None:
        """For its message."""
        self._swarm.network.on_said = self._said
        self._waiting.append(_Waiting(number, fault, self._swarm.now_s + PATIENCE_S))

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._coming

    def give_up(self) -> None:
        """On those messages that nobody has sent: none is late then."""
        for item in [it for it in self._waiting if it.until_s <= self._swarm.now_s]:
            self._waiting.remove(item)
            if item.fault.kind != "late word":
                self._begin(item.number, replace(item.fault, late_s=0.0))

    def _said(self, origin: str, goal: str, request: bytes) -> float | None:
        """How many seconds later it is said, or None: never."""
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
        """A fault whose message is said; whether it still is."""
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
        """Who it is the fault's draw says; of two peers it is an end."""
        others = [it.name for it in self._swarm.peers if it.is_running and it.name not in ends]
        return others[int(fault.draw * len(others))] if others else ends[0]

    def _is_first_word(self, item: _Waiting, origin: str, goal: str) -> bool:
        """Of what one says to several; or another one's: it waits for the second."""
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
    """Of a call of `net.libp2p.control`."""
    try:
        return tag_of(BytesValue.FromString(request).value)
    except (DecodeError, Unreadable):
        return ""
