"""What the bulk plane is given at its start: the listeners to tell, and the limits of what it
takes."""

from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass, field

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.frames import FrameHeader, FrameLimits

OnFrame = Callable[[str, FrameHeader, bytearray], Awaitable[None] | None]
OnFault = Callable[[str, PeerFault], None]
OnLost = Callable[[str, str, Unreachable], None]
OnUndelivered = Callable[[str, str, Refused | Unreachable, Set[ViewId]], None]
AdmitFrame = Callable[[str, str, FrameHeader], Awaitable[None] | None]

STALL_S = 60.0
WINDOW_BYTES = 64 << 20
IDLE_S = 300.0
"""A lane on which nothing was sent for so long may end where there are many."""
STRIPES_LIMIT = 16
"""Measured at 1 Gbit/s and 100 ms: 8 streams carry 75 MB/s, 16 carry 98, and 32 no more than 16."""


def _nobody(peer_id: str, lane: str, error: Unreachable) -> None:
    """Do nothing: the sender hears of it anyway."""


def _any(sender: str, lane: str, header: FrameHeader) -> None:
    """Admit every frame."""


@dataclass(frozen=True)
class BulkListeners:
    """Functions that take frames, or hear of what goes wrong.

    `frame(sender, header, payload)` takes a frame. While it (or what it returns) waits, that lane
    of that sender waits too. A `PeerFault` from it ends the stream and reaches the sender as
    `Refused`. `fault(sender, fault)` hears of every such end. `lost(peer_id, lane, error)` hears of
    streams that broke, in either direction. `undelivered(peer_id, lane, error, views)` hears of
    frames that were written and never acknowledged, and of which views they were.
    `admit(sender, lane, header)` raises `PeerFault` for a frame that cannot be, before memory is
    taken for it. What it returns is waited for, and may raise the same.
    """

    frame: OnFrame
    fault: OnFault
    lost: OnLost = _nobody
    undelivered: OnUndelivered | None = None
    """Without this listener the next send raises."""
    admit: AdmitFrame = _any


@dataclass(frozen=True)
class LaneListeners:
    """Functions that hear of a lane: of faults, of streams that broke, of measured rates in bytes
    per second, and of frames that were written and never acknowledged."""

    fault: OnFault
    lost: OnLost
    rate: Callable[[str, float], None]
    undelivered: OnUndelivered | None


@dataclass(frozen=True)
class BulkLimits:
    """How much is under way at once, and for how long a stream may stand still."""

    frames: FrameLimits = field(default_factory=FrameLimits)
    window_bytes: int = WINDOW_BYTES
    """Most bytes written on a lane and not acknowledged."""
    stall_s: float = STALL_S
    most_stripes: int = STRIPES_LIMIT
    in_flight_bytes: int = 0
    """Most bytes that all senders together have announced. From each sender that the door lets go
    first, one frame is taken in any case."""
