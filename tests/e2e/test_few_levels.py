"""Boundaries in four bits a value or fewer, while stage-holders are lost in the middle of steps."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec
from tests.e2e.swarm_in_process import EnginePeer
from tests.e2e.test_codecs_on_edges import reference
from tests.e2e.test_parity import even_plan, synthetic_batch
from tests.e2e.test_partial_replay import scenario

CUT = 3
MOVED = 3e-4
"""The tolerance of a loss. Replicas add in another order than the plain loop. On some processors
that moves a value a whole one of so few levels."""


class Frames:
    """Counts what crossed the boundary, by kind; a step that is made again sends some frames
    anew."""

    def __init__(self, codec: str) -> None:
        self.codec = codec
        self.sent: dict[tuple[int, FrameKind, int, int], list[bytes]] = {}

    def watch(self, peer: EnginePeer) -> None:
        deliver = peer.on_frame

        def seen(sender: str, header: FrameHeader, payload: bytearray) -> None:
            key = header.step, header.kind, header.layer, header.index
            if header.kind in (FrameKind.ACTIVATION, FrameKind.ACTIVATION_GRADIENT):
                assert header.codec == self.codec
                self.sent.setdefault(key, []).append(bytes(payload))
            deliver(sender, header, payload)

        peer.bulk._incoming.listeners = replace(peer.bulk._incoming.listeners, frame=seen)


@pytest.mark.parametrize("codec", ["rotated4", pytest.param("subspace", marks=pytest.mark.nightly)])
def test_a_step_that_is_made_again_sends_the_same_bytes_and_comes_to_the_same_loss(
    tmp_path: Path, codec: str
) -> None:
    torch.set_num_threads(1)
    codecs = {"activations": codec, "gradients": codec}
    spec = run_spec(batch={"global_batch": 16, "microbatch": 1}, codecs=codecs)
    assert [s.first_layer for s in even_plan(["a", "b"], (2,), spec).pipelines[0].stages] == [
        0,
        CUT,
    ]
    frames = Frames(codec)
    losses = asyncio.run(scenario(tmp_path, spec, frames.watch))
    again = [payloads for payloads in frames.sent.values() if len(payloads) > 1]
    assert len(again) > 4, "what was lost came once more"
    assert all(len(set(payloads)) == 1 for payloads in again)
    expected = list(reference(spec, {CUT: (codec, codec)}).losses(len(losses)))
    plain = list(ReferenceRun(spec, synthetic_batch(spec)).losses(len(losses)))
    off = [max(abs(a - b) for a, b in zip(losses, o, strict=True)) for o in (expected, plain)]
    assert off[0] < MOVED < off[1], off
    assert losses[-1] < losses[0]
