"""A segment's reduction between its holders. Short work is the event loop's own, and long work that
of other threads; either way all have the same sums."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest
import torch

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.reduction import segment_exchange
from p2p_dtfm.daemon.step.reduction.segment_exchange import exchange, sum_digest
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.streams.frames import FrameKind, Payload
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.stage.finite import NotFinite
from p2p_dtfm.train.stage.segment_reduction import SegmentCut, SegmentReduction
from tests.core.builders import run_spec

HOLDERS = ("a", "b", "c")
ELEMENTS, CHUNKS = 600, 6


class Counted(Compute):
    """Counts the jobs that run beside the compute thread."""

    beside = 0

    async def run_beside(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self.beside += 1
        return await super().run_beside(function, *args, **named)


class Between:
    """One holder's way to the other holders, which are in this process."""

    def __init__(self, me: str, mail: "defaultdict[Any, asyncio.Queue[bytearray]]") -> None:
        self._me = me
        self._mail = mail

    async def send(
        self, peer_id: str, kind: FrameKind, chunk: int, elements: int, payload: Payload
    ) -> None:
        self._mail[self._me, peer_id, kind, chunk].put_nowait(bytearray(payload))

    async def take(self, peer_id: str, kind: FrameKind, chunk: int) -> bytearray:
        return await self._mail[peer_id, self._me, kind, chunk].get()

    async def blame_and_wait(self, peer_id: str, fault: PeerFault) -> NoReturn:
        raise fault


async def _reduced(gradients: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any], int]:
    """What all holders have in the end, the digests that they state, and the number of their jobs
    beside."""
    spec, mail = run_spec(), defaultdict[Any, Any](asyncio.Queue)
    size = ELEMENTS // CHUNKS
    bounds = [(size * n, size * (n + 1)) for n in range(CHUNKS)]
    owners = [HOLDERS[n % len(HOLDERS)] for n in range(CHUNKS)]
    sides, computes, running = [], [], []

    async def final(layer: int) -> None:
        assert layer == 1

    for me, gradient in zip(HOLDERS, gradients, strict=True):
        cut = SegmentCut(1, bounds, [ELEMENTS])
        side = SegmentReduction(spec, codec_of("fp32", spec.codecs), 0, cut, None)
        side.fill(1, gradient)
        sides.append(side)
        computes.append(compute := Counted())
        way = Between(me, mail)
        running.append(exchange(side, me, HOLDERS, owners, way, compute, final))
    digests = await asyncio.gather(*running)
    for compute in computes:
        compute.close()
    return [side.reduced for side in sides], digests, sum(it.beside for it in computes)


@pytest.mark.parametrize("is_short", [True, False])
def test_all_have_the_same_sums_whoever_adds_them(
    is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = 4 * ELEMENTS // CHUNKS * len(HOLDERS)
    monkeypatch.setattr(segment_exchange, "SHORT_BYTES", whole if is_short else whole - 1)
    torch.manual_seed(1)
    gradients = [torch.randn(ELEMENTS) for _ in HOLDERS]
    reduced, digests, beside = event_loop.run(_reduced(gradients))
    wanted = gradients[0] + gradients[1] + gradients[2]
    assert all(torch.equal(one, wanted) for one in reduced)
    pieces = wanted.view(CHUNKS, -1)
    stated = [
        sum_digest(b"".join(sum_digest(pieces[n].numpy()) for n in (place, place + len(HOLDERS))))
        for place in range(len(HOLDERS))
    ]
    assert [list(one) for one in digests] == [stated] * len(HOLDERS)
    assert beside == (0 if is_short else CHUNKS * len(HOLDERS))


def test_where_one_chunk_fails_nothing_of_the_others_is_waited_for_any_more() -> None:
    """Numbers that are not finite ended the reduction. What it had waited for beside them was told
    as lacking for as long as the step stood."""
    waits: set[tuple[str, int]] = set()

    class Nobody(Between):
        async def take(self, peer_id: str, kind: FrameKind, chunk: int) -> bytearray:
            if chunk == CHUNKS - 1:
                raise NotFinite("a sum")
            waits.add((peer_id, chunk))
            try:
                return await super().take(peer_id, kind, chunk)
            finally:
                waits.remove((peer_id, chunk))

    async def fails() -> None:
        spec, size, compute = run_spec(), ELEMENTS // CHUNKS, Compute()
        cut = SegmentCut(1, [(size * n, size * (n + 1)) for n in range(CHUNKS)], [ELEMENTS])
        side = SegmentReduction(spec, codec_of("fp32", spec.codecs), 0, cut, None)
        side.fill(1, torch.zeros(ELEMENTS))
        owners = [HOLDERS[n % len(HOLDERS)] for n in range(CHUNKS)]

        async def final(layer: int) -> None:
            assert layer == 1

        way = Nobody("a", defaultdict(asyncio.Queue))
        with pytest.raises(NotFinite):
            await exchange(side, "a", HOLDERS, owners, way, compute, final)
        assert waits, "else this test tests nothing"
        await asyncio.sleep(0)
        assert not waits
        compute.close()

    event_loop.run(fails())
