"""Which tensors travel on which lane, and how large they are at most: asked before memory is
taken."""

from p2p_dtfm.core.planner.wire_plan import CHUNK_ELEMENTS
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, Workload
from p2p_dtfm.net.streams.frames import CODEC_ROOM_BYTES, FrameHeader, FrameKind, FrameLimits

KINDS = {
    "forward": (FrameKind.ACTIVATION,),
    "backward": (FrameKind.ACTIVATION_GRADIENT,),
    "reduce": (FrameKind.GRADIENT_PART, FrameKind.GRADIENT_SUM),
    "state": (FrameKind.LAYER_GRADIENT, FrameKind.LAYER_STATE),
}
CHUNK_LIMIT_BYTES = CHUNK_ELEMENTS * FLOAT_BYTES + CODEC_ROOM_BYTES
"""Of gradients and states."""


def frame_limits(workload: Workload) -> FrameLimits:
    """No tensor of the run is larger."""
    boundary_bytes = workload.boundary_bytes + CODEC_ROOM_BYTES
    return FrameLimits(payload_bytes=max(CHUNK_LIMIT_BYTES, boundary_bytes))


def require_of_lane(sender: str, lane: str, header: FrameHeader) -> None:
    """Raises `PeerFault`."""
    if header.kind not in KINDS[lane]:
        raise PeerFault(f"a frame of kind {header.kind} on the lane {lane}", sender)
    if lane in ("reduce", "state") and header.payload_bytes > CHUNK_LIMIT_BYTES:
        raise PeerFault(f"a {header.kind} of {header.payload_bytes} bytes", sender)
