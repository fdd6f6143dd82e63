"""A tensor on its way out of a stage-holder."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.streams.frames import FrameKind


@pytest.mark.parametrize("error", [Unreachable("b", "gone"), ValueError("a bug")])
def test_a_tensor_that_is_not_sent_is_told_of_whatever_the_cause(error: Exception) -> None:
    """The others would wait for it, and take its sender for who stands still."""

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
