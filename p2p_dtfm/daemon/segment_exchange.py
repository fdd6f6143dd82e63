"""The bytes of a segment's reduction between its holders, chunk by chunk.

All chunks are under way at once: parts travel while sums are added, and a sum travels as soon as
the last part of its chunk is in.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.net.frames import FrameKind, Payload
from p2p_dtfm.train.segment_reduction import SegmentReduction

Tensor = Any


class Courses(Protocol):
    """How frames of one segment in one step go out and come in."""

    async def send(
        self, peer_id: str, kind: FrameKind, chunk: int, elements: int, payload: Payload
    ) -> None:
        """May return before the payload is written, which then must stay as it is."""

    async def take(self, peer_id: str, kind: FrameKind, chunk: int) -> bytearray:
        """Waits for the frame."""

    async def refuse(self, peer_id: str, fault: PeerFault) -> NoReturn:
        """A payload that cannot be read: the exchange cannot go on, and waits to be cancelled."""


async def exchange(
    reduction: SegmentReduction,
    me: str,
    holders: Sequence[str],
    owners: Sequence[str],
    courses: Courses,
    compute: Compute,
) -> None:
    """Bring a reduction to its end. `holders` in pipeline order; `owners` of each chunk."""
    await asyncio.gather(
        *(
            _own(reduction, chunk, me, holders, courses, compute)
            if owner == me
            else _others(reduction, chunk, owner, courses, compute)
            for chunk, owner in enumerate(owners)
        )
    )


async def _others(
    reduction: SegmentReduction, chunk: int, owner: str, courses: Courses, compute: Compute
) -> None:
    elements = reduction.elements(chunk)
    payload = await compute.run(reduction.part, chunk)
    await courses.send(owner, FrameKind.GRADIENT_PART, chunk, elements, payload)
    total = await courses.take(owner, FrameKind.GRADIENT_SUM, chunk)
    try:
        await compute.run(reduction.take_sum, chunk, total)
    except PeerFault as fault:
        await courses.refuse(owner, fault)


async def _own(
    reduction: SegmentReduction,
    chunk: int,
    me: str,
    holders: Sequence[str],
    courses: Courses,
    compute: Compute,
) -> None:
    elements = reduction.elements(chunk)
    parts: list[Tensor | None] = []
    for holder in holders:
        if holder == me:
            parts.append(None)
            continue
        payload = await courses.take(holder, FrameKind.GRADIENT_PART, chunk)
        try:
            parts.append(await compute.run(reduction.read_part, chunk, payload))
        except PeerFault as fault:
            await courses.refuse(holder, fault)
    total = await compute.run(reduction.add_parts, chunk, parts)
    del parts
    others = [holder for holder in holders if holder != me]
    await asyncio.gather(
        *(courses.send(h, FrameKind.GRADIENT_SUM, chunk, elements, total) for h in others)
    )
