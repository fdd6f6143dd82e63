"""Which tensors travel on which lane, how large they are at most, and which frames tell of their
sender's losses. The size is asked before memory is taken."""

from typing import NamedTuple

from p2p_dtfm.core.audit.told_losses import Tellers, tellers
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, Workload
from p2p_dtfm.core.schedule.pieces import CHUNK_ELEMENTS
from p2p_dtfm.net.streams.frames import CODEC_ROOM_BYTES, FrameHeader, FrameKind, FrameLimits

KINDS = {
    "forward": (FrameKind.ACTIVATION,),
    "backward": (FrameKind.ACTIVATION_GRADIENT,),
    "reduce": (FrameKind.GRADIENT_PART, FrameKind.GRADIENT_SUM),
    "state": (FrameKind.LAYER_GRADIENT, FrameKind.LAYER_STATE),
}
CHUNK_LIMIT_BYTES = CHUNK_ELEMENTS * FLOAT_BYTES + CODEC_ROOM_BYTES
"""The largest payload of a frame with gradients or states."""


def frame_limits(workload: Workload) -> FrameLimits:
    """The limits of this run's frames: no tensor of the run is larger."""
    boundary_bytes = workload.boundary_bytes + CODEC_ROOM_BYTES
    return FrameLimits(payload_bytes=max(CHUNK_LIMIT_BYTES, boundary_bytes))


def require_of_lane(sender: str, lane: str, header: FrameHeader) -> None:
    """Raises `PeerFault` for a kind of frame that has no place on this lane, or a payload that is
    too large."""
    if header.kind not in KINDS[lane]:
        raise PeerFault(f"a frame of kind {header.kind} on the lane {lane}", sender)
    if lane in ("reduce", "state") and header.payload_bytes > CHUNK_LIMIT_BYTES:
        raise PeerFault(f"a {header.kind} of {header.payload_bytes} bytes", sender)


class LossFrames(NamedTuple):
    """The frames with which a peer tells of its losses, in a run with audits. By then all its
    forwards are done."""

    told: Tellers

    def has(self, sender: str, kind: FrameKind, layer: int, index: int) -> bool:
        if sender not in self.told.heads:
            return False
        if kind is FrameKind.ACTIVATION_GRADIENT:
            last = self.told.last[sender]
            return last.before != "" and index == last.microbatch
        is_reduced = not self.told.is_one and layer == self.told.first_layer
        return is_reduced and kind in KINDS["reduce"]


def loss_frames(spec: RunSpec, plan: Plan) -> LossFrames | None:
    return LossFrames(tellers(plan)) if spec.audit.rate else None
