"""Lies that colluders tell together, or that each of them can tell only where one process plays the
whole world."""

from typing import Any

import msgspec

from p2p_dtfm.core.audit.work import WORK_BYTES
from p2p_dtfm.core.commit.judgement import DIGEST_BYTES
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import StateDigest
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.step.reduction.step_reduction import _Courses
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.patches import Patches

WRONG = bytes(WORK_BYTES)


def _accusations(patches: Patches, lying: Lying) -> None:
    """Accuses a work for which nobody is drawn, and which nobody doubts. Only its Prepared says so,
    which most peers see too late."""

    async def account(self: Any, view: Any, plan: Any, *rest: Any) -> Any:
        said = await honest(self, view, plan, *rest)
        if said is None or lying.kind() != "accuses unasked":
            return said
        if victims := lying.victims(plan.stage_holders()):
            lying.tell()
            found, disputed = said.found | {victims[0]: WRONG}, said.disputed | {victims[0]: True}
            return msgspec.structs.replace(said, found=found, disputed=disputed)
        return said

    honest = patches.put(Audits, "account", account)


def _sums_to_some(patches: Patches, lying: Lying) -> None:
    async def send(
        self: Any, peer_id: str, kind: Any, chunk: int, elements: int, payload: Any
    ) -> None:
        is_sum = kind is FrameKind.GRADIENT_SUM
        if is_sum and lying.kind() == "sum to some" and _is_first(lying, peer_id, self):
            lying.tell()
            payload = _other(bytes(memoryview(payload).cast("B")))
        await honest(self, peer_id, kind, chunk, elements, payload)

    honest = patches.put(_Courses, "send", send)


def _is_first(lying: Lying, peer_id: str, courses: Any) -> bool:
    """Whether the peer is the first of the honest ones that hold what is summed."""
    return lying.victims(courses._mailbox._holders[courses._layer])[:1] == [peer_id]


def _other(payload: bytes) -> bytes:
    """The payload, with another sign in its last number, which stays finite."""
    return payload[:-1] + bytes([payload[-1] ^ 0x80])


def _states(patches: Patches, lying: Lying) -> None:
    """Gives newcomers wrong states, and lets colluders confirm them when they are asked."""

    def put(self: Any, payload: memoryview, *others: Any) -> str:
        if lying.kind() != "state":
            return str(right(self, payload, *others))
        lying.tell()
        other = _other(bytes(payload))
        named = (bytes.fromhex(digest_bytes(it))[:DIGEST_BYTES] for it in (payload, other))
        lying.states.update([tuple(named)])  # type: ignore[list-item]
        return str(right(self, other, *others))

    def tell(self: Any, peer_id: str, message: Any, *others: Any) -> None:
        if isinstance(message, StateDigest) and lying.kind() == "state":
            told = lying.states.get(message.digest, message.digest)
            message = msgspec.structs.replace(message, digest=told)
        said(self, peer_id, message, *others)

    right = patches.put(Offers, "put", put)
    said = patches.put(Messenger, "tell", tell)


def _frames(patches: Patches, lying: Lying) -> None:
    """Sends frames to colluders alone, and tells everybody who asks that all was sent."""

    def send_later(self: Any, peer_id: str, lane: str, header: Any, payload: Any) -> None:
        if lying.kind() == "frames withheld" and peer_id not in lying.names:
            lying.tell()
            self._given.add((peer_id, header.step, header.kind, header.layer, header.index))
            return
        honest(self, peer_id, lane, header, payload)

    honest = patches.put(StepFrames, "send_later", send_later)


def _claims(patches: Patches, lying: Lying) -> None:
    """Says its claims to nobody, and records them as said."""

    def say(self: Any, here: Any, said: Any) -> None:
        if lying.kind() == "claims withheld":
            lying.tell()
            here.book.record(self._tools.me, said)
            return
        honest(self, here, said)

    honest = patches.put(Audits, "_say", say)


LIES = (
    _accusations,
    _sums_to_some,
    _states,
    _frames,
    _claims,
)
