"""Tensors on their way out of a stage-holder."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.plan import Stage
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.daemon.step.pipeline.open_step_work import Outgoing
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.streams.frames import FrameKind


@pytest.mark.parametrize("error", [Unreachable("b", "gone"), ValueError("a bug")])
def test_a_tensor_that_is_not_sent_is_told_of_whatever_the_cause(error: Exception) -> None:
    """The others would wait for the tensor, and take its sender for a peer that stands still."""

    async def scenario() -> None:
        async def send(*frame: Any) -> None:
            raise error

        told: list[str] = []
        transport = SimpleNamespace(send=send)
        view = ViewId(1, "ab" * 32)
        frames = StepFrames(view, transport, lambda peer_id, cause: told.append(peer_id))
        header = frames.header(0, FrameKind.ACTIVATION, 1, 0, (1,), "fp32")
        frames.send_later("b", "forward", header, bytes(4))
        await asyncio.sleep(0.01)
        assert told == ["b"] and not frames.is_writing_to("b")

    asyncio.run(scenario())


class Ahead:
    """A boundary with a line behind it on which nothing moves."""

    def __init__(self, frames: StepFrames, count: int) -> None:
        self.held_out, self.made, self._frames = range(count), 0, frames

    def outgoing(self, *made: Any) -> Outgoing:
        self.made += 1
        return Outgoing("fp32", bytes(4))

    def neighbour(self, kind: FrameKind, number: int) -> Stage:
        return Stage("b", 2, 6, 1)

    def send(self, step: int, kind: FrameKind, number: int, sent: Outgoing) -> None:
        header = self._frames.header(step, kind, 2, number, (1,), sent.codec)
        self._frames.send_later("b", "forward", header, sent.payload)


class Evaluated(Microbatches):
    """The microbatches of a first stage that computes at once."""

    def __init__(self, count: int, in_flight: int) -> None:
        self.line = asyncio.Semaphore(0)
        transport = SimpleNamespace(send=self.sends)
        self._frames = StepFrames(ViewId(1, "ab" * 32), transport, lambda peer_id, cause: None)
        self._runner: Any = SimpleNamespace(has_embedding=True, has_head=False)
        self._work: Any = SimpleNamespace(keeps_held_out=False)
        self._compute, self._stage = Compute(), Stage("a", 0, 2, in_flight)
        self._boundary: Any = Ahead(self._frames, count)

    @property
    def made(self) -> int:
        return int(self._boundary.made)

    async def sends(self, *frame: Any) -> None:
        await self.line.acquire()

    def _evaluate(self, step: int, number: int, activation: Any) -> Any:
        return None


def test_held_out_tensors_are_made_no_faster_than_they_leave() -> None:
    """All tensors of an evaluation waited in memory for a thin line: a gigabyte for GPT-3 XL."""

    async def scenario() -> None:
        first = Evaluated(count=20, in_flight=3)
        evaluating = asyncio.create_task(first.evaluate(0))
        for written in (0, 1, 2):
            while first.made <= 3 + written:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            assert first.made == 4 + written
            first.line.release()
        for _ in range(20):
            first.line.release()
        await evaluating
        assert first.made == 20
        first._compute.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))
