"""A cache of what signed statements contain or are called, bounded by bytes.

A bound on their number would not do: 4,096 of the largest contributions, which one member may make,
take gigabytes once they are opened.
"""

from typing import Generic, TypeVar

from p2p_dtfm.core.protocol.signed import Signed

Value = TypeVar("Value")


class OpenedOnce(Generic[Value]):
    """Values by statement, for the newest statements whose payloads fit into `limit_bytes`. An
    opened payload takes up to eight times as much: a number of one byte has a place of eight."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[Signed, Value] = {}
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def find(self, signed: Signed) -> Value | None:
        return self._held.get(signed)

    def keep(self, signed: Signed, value: Value) -> Value:
        """Keeps `value`, unless the statement has one, and returns what is kept. Older ones make
        room."""
        if (held := self._held.get(signed)) is not None:
            return held
        self._held[signed] = value
        self._held_bytes += _size_bytes(signed)
        while self._held_bytes > self._limit_bytes:
            oldest = next(iter(self._held))
            del self._held[oldest]
            self._held_bytes -= _size_bytes(oldest)
        return value


def _size_bytes(signed: Signed) -> int:
    return len(signed.payload) + 256
