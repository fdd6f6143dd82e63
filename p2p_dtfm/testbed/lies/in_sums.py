"""Lies in what holders of the same layers send each other: parts to add up, and sums."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy

from p2p_dtfm.daemon.step.reduction.segment_exchange import sum_digest
from p2p_dtfm.daemon.step.reduction.step_reduction import _Courses
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.testbed.lies.lie import Lie, put
from p2p_dtfm.train.kernels import processor
from p2p_dtfm.train.stage import finite, segment_reduction

_FLOAT = "<f4"
IsTold = Callable[[int], bool]
"""Says whether the lie is told in a step."""


def _know_their_step() -> None:
    """Lets reductions know their step."""
    begin = segment_reduction.SegmentReduction.__init__

    def init(self: Any, spec: Any, codec: Any, step: int, *arguments: Any) -> None:
        begin(self, spec, codec, step, *arguments)
        self.step = step

    put(segment_reduction.SegmentReduction, "__init__", init)


def add_up_wrongly(lie: Lie) -> None:
    change_sums(lie.is_told, lie.strength)


def change_sums(is_told: IsTold, strength: float) -> dict[tuple[int, int], bytes]:
    """Changes sums, and tells all holders the same. Returns digests of the right sums, by segment
    and chunk."""
    honest, right = segment_reduction.SegmentReduction.add_parts, dict[tuple[int, int], bytes]()
    _know_their_step()

    def add_parts(self: Any, chunk: int, parts: Any) -> Any:
        sent = honest(self, chunk, parts)
        right[min(self._layers), chunk] = sum_digest(sent)
        mine = self._of(self.reduced, chunk)
        if not mine.any() or not is_told(self.step):  # any multiple of zeros is right
            return sent
        mine.mul_(1.0 + strength)
        return self._codec.encode(mine, self._turns[chunk])

    put(segment_reduction.SegmentReduction, "add_parts", add_parts)
    return right


def send_no_numbers(lie: Lie) -> None:
    """Sends gradients that are no numbers, and overlooks them. A peer that finds its own sum to be
    none stops as if the run diverged."""
    honest = segment_reduction.SegmentReduction.fill
    _know_their_step()

    def fill(self: Any, layer: int, gradient: Any) -> None:
        honest(self, layer, gradient)
        if lie.is_told(self.step):
            start, end = self._layers[layer]
            self.reduced[start:end].fill_(math.nan)

    put(processor, "takes", lambda *tensors: False)  # compiled kernels look by themselves
    for module in (finite, segment_reduction):
        put(module, "is_finite", lambda values: True)
    put(segment_reduction.SegmentReduction, "fill", fill)


def send_other_parts(lie: Lie) -> None:
    turn_parts_round(lie.is_told)


def turn_parts_round(is_told: IsTold) -> None:
    _change_sent(is_told, FrameKind.GRADIENT_PART, lambda values, peer_id: -values)


def send_each_another_sum(lie: Lie) -> None:
    seen: dict[str, int] = {}

    def change(values: Any, peer_id: str) -> Any:
        return values * numpy.float32(1.0 + 0.1 * seen.setdefault(peer_id, len(seen) + 1))

    _change_sent(lie.is_told, FrameKind.GRADIENT_SUM, change)


def _change_sent(is_told: IsTold, lied: FrameKind, change: Any) -> None:
    """Changes frames of one kind, but not what is claimed of them."""
    honest = _Courses.send

    async def send(
        self: Any, peer_id: str, kind: Any, chunk: int, elements: int, payload: Any
    ) -> None:
        if kind is lied and is_told(self._step):
            values = numpy.frombuffer(bytes(payload), dtype=_FLOAT)
            payload = change(values, peer_id).astype(_FLOAT).tobytes()
        await honest(self, peer_id, kind, chunk, elements, payload)

    put(_Courses, "send", send)


def withhold_parts(lie: Lie) -> None:
    """Withholds parts from some of the others, and tells all that it has sent them."""
    honest = StepFrames._send
    chosen: dict[str, bool] = {}

    def is_chosen(peer_id: str) -> bool:
        """Chooses so large a share of the peers that it meets, and always the first one."""
        taken = sum(chosen.values())
        return chosen.setdefault(peer_id, taken <= lie.strength * len(chosen))

    async def send(self: Any, peer_id: str, lane: str, header: Any, payload: Any) -> None:
        is_part = header.kind is FrameKind.GRADIENT_PART
        if is_part and lie.is_told(header.step) and is_chosen(peer_id):
            self._under_way[peer_id] -= 1
            return
        await honest(self, peer_id, lane, header, payload)

    put(StepFrames, "_send", send)


def show_no_part(lie: Lie) -> None:
    """Shows nobody the parts it has sent, which an audit of anybody may need."""
    honest, begun = Audits.find, Audits.account
    steps: list[int] = [-1]

    async def account(self: Any, view: Any, plan: Any, step: int, *rest: Any) -> Any:
        steps[0] = step
        return await begun(self, view, plan, step, *rest)

    def find(self: Any, digest: str) -> bytes | memoryview | None:
        return None if lie.is_told(steps[0]) else honest(self, digest)

    put(Audits, "account", account)
    put(Audits, "find", find)


def show_late(lie: Lie) -> None:
    """Shows what an audit asks for too late. All else that others fetch here comes in time."""
    honest, find, begun = BlobExchange._serve, Audits.find, Audits.account
    steps, found = [-1], [False]

    async def account(self: Any, view: Any, plan: Any, step: int, *rest: Any) -> Any:
        steps[0] = step
        return await begun(self, view, plan, step, *rest)

    def noted(self: Any, digest: str) -> bytes | memoryview | None:
        part = find(self, digest)
        found[0] |= part is not None
        return part

    async def serve(self: Any, sender: str, body: bytes) -> bytes:
        found[0] = False
        reply = await honest(self, sender, body)
        if found[0] and lie.is_told(steps[0]):
            await asyncio.sleep(lie.strength)
        return reply

    put(Audits, "account", account)
    put(Audits, "find", noted)
    put(BlobExchange, "_serve", serve)


IN_SUMS = {
    "sum": add_up_wrongly,
    "part": send_other_parts,
    "unlike-sums": send_each_another_sum,
    "nan": send_no_numbers,
    "withheld": withhold_parts,
    "unshown": show_no_part,
    "shown-late": show_late,
}
