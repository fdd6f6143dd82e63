"""Discrete events in virtual nanoseconds."""

import heapq
from collections.abc import Callable
from typing import Any

Callback = Callable[[Any], None]
NEVER_NS = 1 << 200


class TooLate(Exception):
    """The awaited event comes after the limit."""


class VirtualTime:
    """Calls callbacks that are due, in order of time and, at one time, in the order of asking.

    `settle` callbacks run once each after all events of an instant, before the clock moves on.
    """

    def __init__(self, limit_ns: int = NEVER_NS) -> None:
        """`limit_ns`: until when the result is worth waiting for. This class does not check it; a
        callback that sees it exceeded raises `TooLate`."""
        self.now_ns = 0
        self.limit_ns = limit_ns
        self.event_count = 0
        self._queue: list[tuple[int, int, Callback, Any]] = []
        self._settling: dict[Callback, None] = {}

    def at(self, time_ns: int, callback: Callback, argument: Any) -> None:
        """Call `callback(argument)` at `time_ns`, which must not lie in the past."""
        self.event_count += 1
        heapq.heappush(self._queue, (time_ns, self.event_count, callback, argument))

    def settle(self, callback: Callback) -> None:
        """Call `callback(now)` at the end of this instant; asking twice is asking once."""
        self._settling[callback] = None

    def run(self) -> int:
        """Runs until nothing is due any more. Returns the time of the last event."""
        queue, settling, pop = self._queue, self._settling, heapq.heappop
        while queue or settling:
            if settling and (not queue or queue[0][0] > self.now_ns):
                due = list(settling)
                settling.clear()
                for settle in due:
                    settle(self.now_ns)
                continue
            time_ns, _, callback, argument = pop(queue)
            assert time_ns >= self.now_ns, "time runs forward"
            self.now_ns = time_ns
            callback(argument)
        return self.now_ns
