"""What the kernel counts of a connection: Linux' `struct tcp_info`."""

import socket
import struct
from dataclasses import dataclass

_BYTES = 192
"""As far as it is read here; kernels before 4.10 say less."""
_RETRANSMITTED = struct.Struct("=I"), 100
_MIN_ROUND_TRIP = struct.Struct("=I"), 148
_SENT = struct.Struct("=I"), 156
_TIMES = struct.Struct("=QQQ"), 168
_NAME_BYTES = 16
_UNKNOWN_US = 0xFFFFFFFF
_HELD_BACK_SHARE = 0.5
_HARMLESS_LOSS = 0.001
"""For who goes by rate and round trip. Others slow down with each packet that is lost."""
_BY_RATE = b"bbr"


@dataclass(frozen=True)
class KernelFigures:
    """Of a connection since its beginning."""

    round_trip_s: float | None
    """The shortest that was seen lately; None before the first."""
    sent: int = 0
    """Segments with data."""
    retransmitted: int = 0
    """Of them."""
    goes_by_rate: bool = False
    """It is not slowed down by each loss."""
    busy_s: float = 0.0
    """It had something to send, or to have acknowledged."""
    limited_s: float = 0.0
    """Of that, the buffer at either end let nothing more leave."""

    def is_held_back_since(self, before: "KernelFigures") -> bool:
        """By buffers, or by losses: where it was neither, a connection by itself carries what the
        way has to give, and others beside it would only take it from one another."""
        busy_s, limited_s = self.busy_s - before.busy_s, self.limited_s - before.limited_s
        harmless = _HARMLESS_LOSS * (self.sent - before.sent) if self.goes_by_rate else 0.0
        has_lost = self.retransmitted - before.retransmitted > harmless
        return has_lost or limited_s > _HELD_BACK_SHARE * busy_s


def figures_of(connection: socket.socket) -> KernelFigures | None:
    """None where the kernel does not say: it is closed, or not of Linux, or one that only looks
    like it (gVisor's leaves most at 0, which Linux' shortest round trip never is). From any
    thread."""
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
