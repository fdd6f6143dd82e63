"""What the kernel counts of a connection: Linux' `struct tcp_info`."""

import socket
import struct
from dataclasses import dataclass

_BYTES = 192
"""The part of the struct that is read here. Kernels before 4.10 give less."""
_RETRANSMITTED = struct.Struct("=I"), 100
_MIN_ROUND_TRIP = struct.Struct("=I"), 148
_SENT = struct.Struct("=I"), 156
_TIMES = struct.Struct("=QQQ"), 168
_NAME_BYTES = 16
_UNKNOWN_US = 0xFFFFFFFF
_HELD_BACK_SHARE = 0.5
_HARMLESS_LOSS = 0.001
"""The share of lost packets that does not slow down a congestion control that goes by rate and
round trip. Others slow down with each packet that is lost."""
_BY_RATE = b"bbr"


@dataclass(frozen=True)
class KernelFigures:
    """The kernel's figures of a connection since its beginning."""

    round_trip_s: float | None
    """The shortest round trip seen lately; None before the first."""
    sent: int = 0
    """Segments with data that were sent."""
    retransmitted: int = 0
    """Segments among them that were sent again."""
    goes_by_rate: bool = False
    """Whether the congestion control goes by rate, so that not every loss slows it down."""
    busy_s: float = 0.0
    """How long the connection had something to send, or to have acknowledged."""
    limited_s: float = 0.0
    """How much of `busy_s` the buffer at either end let nothing more leave."""

    def is_held_back_since(self, before: "KernelFigures") -> bool:
        """Whether buffers or losses have held back the connection since `before`. If neither has,
        the connection alone carries all that the way can. More connections beside it would only
        take bandwidth from one another."""
        busy_s, limited_s = self.busy_s - before.busy_s, self.limited_s - before.limited_s
        harmless = _HARMLESS_LOSS * (self.sent - before.sent) if self.goes_by_rate else 0.0
        has_lost = self.retransmitted - before.retransmitted > harmless
        return has_lost or limited_s > _HELD_BACK_SHARE * busy_s


def figures_of(connection: socket.socket) -> KernelFigures | None:
    """The figures of a connection, asked from any thread. None where the kernel does not say: the
    socket is closed, or the system is not Linux, or only looks like it. gVisor leaves most figures
    at 0, and Linux' shortest round trip is never 0."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
        control = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
        (round_trip_us,) = _read(_MIN_ROUND_TRIP, info)
        (sent,), (retransmitted,) = _read(_SENT, info), _read(_RETRANSMITTED, info)
        busy_us, receiver_us, sender_us = _read(_TIMES, info)
    except (OSError, AttributeError, struct.error):
        return None
    if not round_trip_us:
        return None
    return KernelFigures(
        round_trip_us / 1e6 if round_trip_us < _UNKNOWN_US else None,
        sent,
        retransmitted,
        control.startswith(_BY_RATE),
        busy_us / 1e6,
        (receiver_us + sender_us) / 1e6,
    )


def _read(field: tuple[struct.Struct, int], info: bytes) -> tuple[int, ...]:
    return field[0].unpack_from(info, field[1])
