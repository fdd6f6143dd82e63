"""The bytes of a segment's reduction between its holders, chunk by chunk.

All chunks are under way at once: parts travel while sums are added, and a sum travels as soon as
the last part of its chunk is in.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol

from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.net.frames import FrameKind, Payload
from p2p_dtfm.train.segment_reduction import SegmentReduction


class Courses(Protocol):
    """How frames of one segment in one step go out and come in."""

    def send(
        self, peer_id: str, kind: FrameKind, chunk: int, elements: int, payload: Payload
    ) -> Awaitable[None]:
        """Returns when the payload is written; raises as the transport does."""

    def take(self, peer_id: str, kind: FrameKind, chunk: int) -> Awaitable[bytearray]:
        """Waits for the frame."""


async def exchange(
    reduction: SegmentReduction,
    me: str,
    holders: Sequence[str],
    owners: Sequence[str],
    courses: Courses,
    compute: Compute,
) -> None:
    """Bring a reduction to its end. `holders` in pipeline order; `owners` of each chunk.

    All sums that this peer owns are written when it returns. Raises as the transport does, and
    `PeerFault` for a payload that cannot be read.
    """
    async with asyncio.TaskGroup() as chunks:
        for chunk, owner in enumerate(owners):
            if owner == me:
                chunks.create_task(_own(reduction, chunk, me, holders, courses, compute))
            else:
                chunks.create_task(_others(reduction, chunk, owner, courses, compute))


async def _others(
    reduction: SegmentReduction, chunk: int, owner: str, courses: Courses, compute: Compute
) -> None:
    elements = reduction.elements(chunk)
    payload = await compute.run(reduction.part, chunk)
    await courses.send(owner, FrameKind.GRADIENT_PART, chunk, elements, payload)
    total = await courses.take(owner, FrameKind.GRADIENT_SUM, chunk)
    await compute.run(reduction.take_sum, chunk, total)


async def _own(
    reduction: SegmentReduction,
    chunk: int,
    me: str,
    holders: Sequence[str],
    courses: Courses,
    compute: Compute,
) -> None:
    elements = reduction.elements(chunk)
    parts: list[bytearray | None] = [
        None if holder == me else await courses.take(holder, FrameKind.GRADIENT_PART, chunk)
        for holder in holders
    ]
    payload = await compute.run(reduction.add_parts, chunk, parts)
    del parts
    others = [holder for holder in holders if holder != me]
    async with asyncio.TaskGroup() as sends:
        for holder in others:
            sends.create_task(
                courses.send(holder, FrameKind.GRADIENT_SUM, chunk, elements, payload)
            )
