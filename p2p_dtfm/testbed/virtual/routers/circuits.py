"""Connections through a relay, as p2pd has them: a stream to the relay at each end.

The relay is a daemon's own (`net.nat.relay`), and cannot read what it carries. So the streams carry
only so many bytes of nothing. What these stand for arrives with the last of them.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any

from p2p_dtfm.testbed.virtual.wires.host import VirtualHost
from p2p_dtfm.testbed.virtual.wires.streams import VirtualWriter

FRAME_BYTES = 64
KEEPS_ALIVE_S = 30.0
"""How often each end of a connection asks the other end whether it is still there."""
ANSWERS_WITHIN_S = 10.0
"""How long an end waits for the answer until it gives up, as libp2p's multiplexer does."""

Break = Callable[[VirtualHost, str, str], Callable[[], None]]
Note = Callable[[str, str, str, int], None]


class CircuitEnd(VirtualWriter):
    """One end's stream to a relay. Once a circuit goes over it, its bytes are counted."""

    circuit: "Circuit | None" = None
    here = ""
    """The id of the peer whose end it is."""

    def begin_to_count(self, circuit: "Circuit", here: str) -> None:
        early_bytes = self.unread_bytes
        self.circuit, self.here = circuit, here
        self.reader._buffer.clear()  # type: ignore[attr-defined]
        circuit.came(here, early_bytes)

    def receive(self, data: bytes) -> None:
        if self.circuit is None:
            super().receive(data)
        elif not self.is_over:
            self.circuit.came(self.here, len(data))

    def far_end_closed(self) -> None:
        super().far_end_closed()
        self._tell()

    def reset(self) -> None:
        super().reset()
        self._tell()

    def _tell(self) -> None:
        if self.circuit is not None:
            self.circuit.broke(self.here)


class Circuit:
    """One connection through a relay. `caller` has asked the relay for `called`."""

    def __init__(
        self, number: int, relay: str, caller: str, called: str, break_off: Break, note: Note
    ) -> None:
        """`break_off(host, other, name)()` ends at `host` what goes over the circuit. `note` tells
        the trace of what arrived."""
        self.number = number
        self.name = f"circuit {number}"
        self.relay = relay
        self.caller, self.called = caller, called
        self.stands: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._break_off = break_off
        self._note = note
        self._hosts: dict[str, VirtualHost] = {}
        self._ends: dict[str, CircuitEnd] = {}
        self._coming: dict[str, deque[tuple[int, str, Callable[[], None]]]] = {
            caller: deque(),
            called: deque(),
        }
        """What is under way, by the end that it goes to: after how many bytes it is there, what it
        is, and what it does."""
        self._sent_bytes = {caller: 0, called: 0}
        self._came_bytes = {caller: 0, called: 0}

    def begin_at(self, host: VirtualHost, end: CircuitEnd) -> None:
        """`end` is the host's stream to the relay, which is done with its talk to the relay."""
        self._hosts[host.peer_id], self._ends[host.peer_id] = host, end
        end.begin_to_count(self, host.peer_id)

    def link(self, here: str) -> None:
        """The other end has shown who it is: from now on `here` has this connection."""
        if here in self._ends:
            self._hosts[here].circuits.setdefault(self._other(here), []).append(self)
            self._later(KEEPS_ALIVE_S, self._keep_alive, here)

    @property
    def is_live(self) -> bool:
        """It is there at both ends."""
        return len(self._ends) == 2 and not any(host.is_gone for host in self._hosts.values())

    @property
    def is_somewhere(self) -> bool:
        return bool(self._ends)

    def is_at(self, here: str) -> bool:
        return here in self._ends

    def _other(self, here: str) -> str:
        return self.called if here == self.caller else self.caller

    def carry(self, origin: str, what: str, size_bytes: int, arrive: Callable[[], None]) -> None:
        """Sends bytes to the other end, if there still is a way."""
        end, goal = self._ends.get(origin), self._other(origin)
        if end is None or end.is_over:
            return
        self._sent_bytes[goal] += size_bytes
        self._coming[goal].append((self._sent_bytes[goal], what, arrive))
        end.write(bytes(size_bytes))

    def came(self, here: str, count_bytes: int) -> None:
        self._came_bytes[here] += count_bytes
        coming = self._coming[here]
        while coming and coming[0][0] <= self._came_bytes[here]:
            _, what, arrive = coming.popleft()
            self._note(self._other(here), here, what, count_bytes)
            arrive()

    # its end -------------------------------------------------------------------------------------

    def broke(self, here: str) -> None:
        """The stream to the relay has ended at `here`: what went over it breaks."""
        if self._ends.pop(here, None) is None:
            return
        if not self.stands.done():
            self.stands.set_result(False)
        host, other = self._hosts[here], self._other(here)
        left = [circuit for circuit in host.circuits.pop(other, []) if circuit is not self]
        if left:
            host.circuits[other] = left
        self._break_off(host, other, self.name)()

    def close(self, here: str) -> None:
        """Closes the connection from the end `here`."""
        end = self._ends.get(here)
        self.broke(here)
        if end is not None:
            end.close()

    def _keep_alive(self, here: str) -> None:
        if here not in self._ends or self._hosts[here].is_gone:
            return
        answers: list[bool] = []

        def answer() -> None:
            self.carry(self._other(here), "still there", FRAME_BYTES, lambda: answers.append(True))

        self.carry(here, "still there?", FRAME_BYTES, answer)
        self._later(ANSWERS_WITHIN_S, self._judge, here, answers)

    def _judge(self, here: str, answers: list[bool]) -> None:
        if answers:
            self._later(KEEPS_ALIVE_S - ANSWERS_WITHIN_S, self._keep_alive, here)
        else:
            self.close(here)

    def _later(self, delay_s: float, what: Callable[..., None], *args: Any) -> None:
        """Calls `what` later, in no process of this world: p2pd does so."""
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, what, *args, context=contextvars.Context())
