"""The bytes of a segment's reduction between its holders, chunk by chunk.

A chunk sets out as soon as the gradients of its layers are final. All such chunks are under way at
once: parts travel while sums are added, and a sum travels as soon as the last part of its chunk is
in. Sums are made beside the compute thread: there they would wait for the backward of the layers
below, and the peers that wait for a sum with them. A short chunk is not worth a thread.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

from blake3 import blake3

from p2p_dtfm.core.commit.judgement import SUM_DIGEST_BYTES
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.net.streams.frames import FrameKind, Payload
from p2p_dtfm.train.codecs import Buffer
from p2p_dtfm.train.stage.segment_reduction import PoisonedPart, SegmentReduction

SHORT_BYTES = 1 << 22
"""If the parts of all holders together are no larger than this, the event loop itself adds, takes
and digests a chunk, in less than a millisecond: waking other threads would cost a part of that."""

Tensor = Any
Result = TypeVar("Result")
Final = Callable[[int], Awaitable[None]]


class Courses(Protocol):
    """How frames of one segment in one step go out and come in."""

    async def send(
        self, peer_id: str, kind: FrameKind, chunk: int, elements: int, payload: Payload
    ) -> None:
        """May return before the payload is written; until then the payload must stay as it is."""

    async def take(self, peer_id: str, kind: FrameKind, chunk: int) -> bytearray:
        """Waits for the frame."""

    async def blame_and_wait(self, peer_id: str, fault: PeerFault) -> NoReturn:
        """What `peer_id` sent is no gradient: the exchange cannot go on, and waits to be
        cancelled."""


async def exchange(
    reduction: SegmentReduction,
    me: str,
    holders: Sequence[str],
    owners: Sequence[str],
    courses: Courses,
    compute: Compute,
    final: Final,
) -> tuple[bytes, ...]:
    """Bring a reduction to its end. `holders` are in pipeline order; `owners` are those of each
    chunk; `final(layer)` waits until a layer is filled. Returns the digest of all sums of each
    holder, in their order."""
    side = _Side(reduction, me, holders, courses, compute, final)
    order = _order(reduction, me, holders, owners)
    digests = await together(
        side.own(chunk) if owners[chunk] == me else side.others(chunk, owners[chunk])
        for chunk in order
    )
    by_chunk = sorted(zip(order, digests, strict=True))
    return tuple(
        sum_digest(b"".join(digest for chunk, digest in by_chunk if owners[chunk] == holder))
        for holder in holders
    )


async def together(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Wait until all have ended. If one fails, the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def sum_digest(payload: Buffer) -> bytes:
    """A BLAKE3 digest; empty for no bytes. Releases the interpreter's lock. BLAKE3 is four times as
    fast as the SHA-256 that processors have built in, and each holder digests every sum."""
    view = memoryview(payload).cast("B")
    return blake3(view).digest(SUM_DIGEST_BYTES) if len(view) else b""


def _order(
    reduction: SegmentReduction, me: str, holders: Sequence[str], owners: Sequence[str]
) -> list[int]:
    """Last layers first, as they are final first. Among chunks of the same layer each holder begins
    with another owner."""
    mine, count = holders.index(me), len(holders)

    def key(chunk: int) -> tuple[int, int, int]:
        turn = (holders.index(owners[chunk]) - mine) % count
        return -reduction.layers_of(chunk)[0], turn, chunk

    return sorted(range(len(owners)), key=key)


class _Side:
    """What one holder does in an exchange."""

    def __init__(
        self,
        reduction: SegmentReduction,
        me: str,
        holders: Sequence[str],
        courses: Courses,
        compute: Compute,
        final: Final,
    ) -> None:
        self._reduction = reduction
        self._me = me
        self._holders = holders
        self._courses = courses
        self._compute = compute
        self._final = final

    async def _all_final(self, chunk: int) -> None:
        for layer in reversed(self._reduction.layers_of(chunk)):
            await self._final(layer)

    async def others(self, chunk: int, owner: str) -> bytes:
        """Send the part of a chunk and wait for its sum; returns the sum's digest."""
        reduction, courses = self._reduction, self._courses
        await self._all_final(chunk)
        payload = await self._run_if_lossy(reduction.part, chunk)
        elements = reduction.elements(chunk)
        await courses.send(owner, FrameKind.GRADIENT_PART, chunk, elements, payload)
        total = await courses.take(owner, FrameKind.GRADIENT_SUM, chunk)
        try:
            return await self._taken(chunk, total)
        except PeerFault as fault:
            await courses.blame_and_wait(owner, fault)

    async def _taken(self, chunk: int, total: bytearray) -> bytes:
        """Take a sum into what is reduced, and return its digest. Raises `PeerFault`."""
        take, run_beside = self._reduction.take_sum, self._compute.run_beside
        if self._is_short(chunk):
            take(chunk, total)
            return sum_digest(total)
        digest, _ = await asyncio.gather(
            asyncio.to_thread(sum_digest, total), run_beside(take, chunk, total)
        )
        return digest

    def _is_short(self, chunk: int) -> bool:
        size_bytes = FLOAT_BYTES * self._reduction.elements(chunk) * len(self._holders)
        return self._reduction.only_adds and size_bytes <= SHORT_BYTES

    async def own(self, chunk: int) -> bytes:
        """Add what the others send of a chunk, and send them the sum; returns its digest."""
        reduction, courses = self._reduction, self._courses
        await self._all_final(chunk)
        parts: list[Tensor | None] = []
        for holder in self._holders:
            if holder == self._me:
                parts.append(None)
                continue
            payload = await courses.take(holder, FrameKind.GRADIENT_PART, chunk)
            try:
                parts.append(await self._run_if_lossy(reduction.read_part, chunk, payload))
            except PeerFault as fault:
                await courses.blame_and_wait(holder, fault)
        try:
            if is_short := self._is_short(chunk):
                total = reduction.add_parts(chunk, parts)
            else:
                total = await self._compute.run_beside(reduction.add_parts, chunk, parts)
        except PoisonedPart as found:
            await courses.blame_and_wait(self._holders[found.place], PeerFault(str(found)))
        del parts
        elements = reduction.elements(chunk)
        for holder in self._holders:
            if holder != self._me:
                await courses.send(holder, FrameKind.GRADIENT_SUM, chunk, elements, total)
        return sum_digest(total) if is_short else await asyncio.to_thread(sum_digest, total)

    async def _run_if_lossy(self, function: Callable[..., Any], *args: Any) -> Any:
        """In another thread if the codec is lossy. Where nothing is computed, that hop would cost
        more."""
        if self._reduction.is_lossless:
            return function(*args)
        return await self._compute.run_beside(function, *args)
