"""The frames of one view's steps on their way out of a stage-holder."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import NoReturn, Protocol

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, Payload

log = logging.getLogger("p2p_dtfm")


Tells = Callable[[FrameKind, int, int], bytes]
"""What a frame tells of its sender's losses, by kind, layer and index."""


def nothing_told(kind: FrameKind, layer: int, index: int) -> bytes:
    """In a run without audits frames tell of no losses."""
    return b""


class FrameTransport(Protocol):
    """What a step needs of `net.streams.bulk.BulkPlane`."""

    async def send(
        self, peer_id: str, lane: str, header: FrameHeader, payload: Payload
    ) -> None: ...


class StepFrames:
    """`on_trouble(peer_id, cause)` is told of a peer that cannot be sent a tensor, `on_poison` of
    one that sent what no correct peer sends."""

    def __init__(
        self,
        view: ViewId,
        transport: FrameTransport,
        on_trouble: Callable[[str, str], None],
        on_poison: Callable[[str, str], None] | None = None,
    ) -> None:
        self.on_poison = on_poison or on_trouble
        self.on_trouble = on_trouble
        self.tells: Tells = nothing_told
        """What this peer's frames tell of its losses."""
        self._view = view
        self._transport = transport
        self._sends: set[asyncio.Task[None]] = set()
        self._under_way: Counter[str] = Counter()
        self._written = asyncio.Event()
        self._given: set[tuple[str, int, FrameKind, int, int]] = set()

    async def blame_and_wait(self, peer_id: str, fault: PeerFault) -> NoReturn:
        """Blame the sender of an unreadable tensor, and wait: the view change that follows cancels
        this step. Never returns."""
        self.on_poison(peer_id, fault.cause)
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody ends this wait but who cancels it")

    def send_later(self, peer_id: str, lane: str, header: FrameHeader, payload: Payload) -> None:
        """Sends outlive a step that is stopped: a frame cut short would cost the stream."""
        self._given.add((peer_id, header.step, header.kind, header.layer, header.index))
        self._under_way[peer_id] += 1
        task = asyncio.create_task(self._send(peer_id, lane, header, payload))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, peer_id: str, lane: str, header: FrameHeader, payload: Payload) -> None:
        try:
            await self._transport.send(peer_id, lane, header, payload)
        except (Unreachable, Refused) as error:
            self.on_trouble(peer_id, error.cause)
        except Exception:  # else others would wait for it, and blame this peer
            log.exception("bug while sending a tensor to %s", peer_id)
            self.on_trouble(peer_id, "a tensor could not be sent to it")
        finally:
            self._under_way[peer_id] -= 1
            self._written.set()

    def begin_step(self, step: int) -> None:
        """Forget what was given in steps before."""
        self._given = {given for given in self._given if given[1] >= step}

    def has_given(self, peer_id: str, step: int, kind: FrameKind, layer: int, index: int) -> bool:
        """Whether this frame was sent; it may still be under way."""
        return (peer_id, step, kind, layer, index) in self._given

    def is_writing_to(self, peer_id: str) -> bool:
        """Whether a frame for this peer waits for its turn on the line."""
        return self._under_way[peer_id] > 0

    async def few_are_left_for(self, peer_id: str, count: int) -> None:
        """Wait while more than `count` frames wait for this peer's line. Each is held in memory,
        and over a thin line frames are made faster than they leave."""
        while self._under_way[peer_id] > count:
            self._written.clear()
            await self._written.wait()

    def header(
        self,
        step: int,
        kind: FrameKind,
        layer: int,
        index: int,
        shape: tuple[int, ...],
        codec: str,
    ) -> FrameHeader:
        return FrameHeader(
            view_number=self._view.number,
            view_digest=self._view.snapshot,
            step=step,
            kind=kind,
            index=index,
            layer=layer,
            codec=codec,
            dtype="float32",
            shape=shape,
            losses=self.tells(kind, layer, index),
        )
