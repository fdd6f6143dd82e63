"""The two ends of a pipeline give each other what their copies of the tied matrix sum up to."""

import asyncio
from collections.abc import Mapping
from typing import Any

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.schedule.tied_ends import (
    other_end,
    receivers,
    states_ends,
    tied_chunks,
    tied_ends,
)
from p2p_dtfm.daemon.step.mailbox import TIED_CODEC, FrameKey
from p2p_dtfm.daemon.step.reduction.segment_exchange import sum_digest
from p2p_dtfm.daemon.step.stage_tools import StageLinks, StagePlace, StageTools
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.stage.finite import is_finite
from p2p_dtfm.train.stage.tied_head import joined, shared_part

Tensor = Any


class TiedSums:
    """One step's exchange at one peer, behind the reduction of its own end.

    Whatever codec the reduction has, these sums travel as fp32: all holders of an end have decoded
    the same sum, and what both ends add must be equal to the last bit.
    """

    def __init__(self, step: int, place: StagePlace, links: StageLinks, tools: StageTools) -> None:
        self._step = step
        self._spec = place.spec
        self._mailbox = links.mailbox
        self._frames = links.frames
        self._compute = tools.compute
        self._codec = codec_of(TIED_CODEC, place.spec.codecs)
        self._bounds = tied_chunks(place.spec)
        self._lacks = other_end(place.plan, place.me)
        self._receivers = receivers(place.plan, place.me)
        self._states = states_ends(place.plan, place.me, tied_ends(place.spec))
        self.digests: dict[int, bytes] = {}
        """Digests of each end's sum of the matrix, made here or received: what this peer states of
        them."""

    async def give_and_take(self, reduced: Mapping[int, Tensor]) -> Tensor | None:
        """The other end's sum of the matrix, flat fp32; None where this peer has both ends or
        neither. `reduced` has the sum of each layer of this peer's."""
        for end in {end for end, _ in self._receivers}:
            await self._give(end, reduced[end])
        for end in tied_ends(self._spec) if self._states else ():
            if end in reduced:
                await self._note(end, shared_part(self._spec, end, reduced[end]))
        if self._lacks is None:
            return None
        got = await self._take(*self._lacks)
        await self._note(self._lacks[0], got)
        return got

    async def _note(self, end: int, matrix: Tensor) -> None:
        on_host = matrix.detach().cpu().numpy()
        self.digests[end] = await asyncio.to_thread(sum_digest, on_host)

    async def _give(self, end: int, reduced: Tensor) -> None:
        """Send copies: sends outlive a step that is stopped, and a gradient buffer does not."""
        matrix = await self._compute.run_beside(self._copied, end, reduced)
        for chunk, (start, stop) in enumerate(self._bounds):
            payload = self._codec.encode(matrix[start:stop])
            for receiver in (peer for each, peer in self._receivers if each == end):
                kind, shape = FrameKind.GRADIENT_SUM, (stop - start,)
                header = self._frames.header(self._step, kind, end, chunk, shape, TIED_CODEC)
                self._frames.send_later(receiver, "reduce", header, payload)

    def _copied(self, end: int, reduced: Tensor) -> Tensor:
        return shared_part(self._spec, end, reduced).cpu().clone()

    async def _take(self, end: int, sender: str) -> Tensor:
        chunks = range(len(self._bounds))
        parts = await asyncio.gather(*(self._chunk(end, sender, chunk) for chunk in chunks))
        return await self._compute.run_beside(joined, parts)

    async def _chunk(self, end: int, sender: str, chunk: int) -> Tensor:
        key = FrameKey(self._step, FrameKind.GRADIENT_SUM, end, chunk, sender)
        payload = await self._mailbox.take(key)
        start, stop = self._bounds[chunk]
        try:
            return await self._compute.run_beside(self._decoded, payload, stop - start)
        except PeerFault as fault:
            await self._frames.blame_and_wait(sender, fault)

    def _decoded(self, payload: bytearray, elements: int) -> Tensor:
        values = self._codec.decode(payload, (elements,))
        if not is_finite(values):
            raise PeerFault("a sum of gradients with a value that is not finite")
        return values
