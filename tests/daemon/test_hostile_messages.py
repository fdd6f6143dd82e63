"""Whatever another peer says of steps and states, in whatever state this one is: it is taken, or it
is the sender's fault. Nothing else is raised, at once or by a task later."""

import asyncio
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.loss_counts import loss_counts
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import (
    CheckpointFiles,
    ConfirmLayers,
    FollowDone,
    FollowEnded,
    FollowLayers,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
    StateDigest,
)
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from tests.core.builders import stated
from tests.core.planning import name_of
from tests.daemon.trainer_parts import SPEC, QuietOutlet, settle, trainer_tools, view_of
from tests.e2e.test_parity import even_plan

ME, OTHER = name_of(0), name_of(1)
INTEGERS = (-1, 0, 1, 2, 5, 6, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e300, math.nan, math.inf, -math.inf)
TEXTS = ("", "x" * 100_000, "00" * 32, "\0")
LAYERS = ({}, {0: -1}, {n: 0 for n in range(6)}, {(1 << 63) - 1: -1}, {-1: (1 << 63) - 1})


def valid(view: ViewId) -> list[Any]:
    return [
        FollowLayers(view, 1, {0: -1}, False),
        FollowLayers(view, 1, {0: -1}, True),
        ConfirmLayers(view, 1, (0,)),
        StateDigest(view, 1, 0, 0, b"1" * 16),
        LayerOffered(view, 1, 0, 0, "00" * 32, 100),
        LayersCommitted(view, 1, 0, 1.0),
        LayerReceipt(view, 0, (0,)),
        FollowEnded(view, 1, "no reason"),
        FollowDone(view, 1),
        CheckpointFiles(0, "", {0: ("00" * 32, 100)}),
        Prepared(view, 0, OTHER, {0: 1.0}, 1.0, 4, 0.0, 0, None),
        FrameHeader(
            view_number=view.number,
            view_digest=view.snapshot,
            step=0,
            kind=FrameKind.LAYER_GRADIENT,
            index=0,
            layer=0,
            codec="fp32",
            dtype="float32",
            shape=(4,),
        ),
    ]


def hostile(message: Any) -> Iterator[Any]:
    """The message, and it with every field in turn of any value that its type allows."""
    yield message
    for name in message.__struct_fields__:
        value = getattr(message, name)
        for other in _others(name, value):
            yield msgspec.structs.replace(message, **{name: other})


def _others(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, FrameKind):
        return tuple(FrameKind)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return INTEGERS
    if isinstance(value, float):
        return FLOATS
    if isinstance(value, str):
        return TEXTS
    if isinstance(value, bytes):
        return (b"", b"1" * 100_000)
    if isinstance(value, tuple):
        return ((), (0,) * 10_000, (-1, (1 << 63) - 1))
    if isinstance(value, ViewId):
        return ViewId(0, ""), ViewId((1 << 64) - 1, "x"), ViewId(value.number, "another")
    if name == "files":
        texts = tuple({0: (text, 1 << 62)} for text in TEXTS)
        return (*texts, {(1 << 63) - 1: ("00" * 32, 1)}, {0: ("00" * 32, -1)})
    if name in ("squared_norms", "states", "sums"):
        empty = {"squared_norms": math.nan, "states": b"", "sums": ()}[name]
        return tuple({layer: empty for layer in layers} for layers in LAYERS)
    return LAYERS if isinstance(value, dict) else ()


class Line:
    """A messenger and a bulk plane whose other ends take everything."""

    async def ask(self, peer_id: str, message: Any) -> None: ...

    async def send(self, peer_id: str, lane: str, header: Any, payload: Any) -> None: ...

    def tell(self, peer_id: str, message: Any) -> None: ...


class Blobs:
    """Nobody has any."""

    async def fetch_bytes(self, digest: str, peers: list[str], max_bytes: int) -> bytes:
        raise BlobUnavailable(digest, {OTHER: "gone"})


def no_view(trainer: Trainer, view: View) -> None: ...


def agreed(trainer: Trainer, view: View) -> None:
    """It follows the layers of its place in the next view."""
    assert isinstance(view.plan, Plan)
    present = even_plan([OTHER, ME], (2,), SPEC)
    snapshot = msgspec.structs.replace(view.snapshot, planned=True, present=present)
    trainer.view_agreed(View(snapshot, view.plan), True)


def trains(trainer: Trainer, view: View) -> None:
    assert isinstance(view.plan, Plan)
    trainer.view_agreed(view, False)
    terms, counts = terms_of(SPEC), loss_counts(view.plan)
    trainer.take_over(view, 0, Ledger(view.id, view.plan, 0, terms, counts), None)


def stopped(trainer: Trainer, view: View) -> None:
    trains(trainer, view)
    trainer.stop_step()


def left(trainer: Trainer, view: View) -> None:
    trains(trainer, view)
    trainer.leave_views()


@pytest.mark.parametrize("prepare", [no_view, agreed, trains, stopped, left])
def test_every_message_with_every_value(tmp_path: Path, prepare: Any) -> None:
    torch.set_num_threads(1)
    blobs: Any = Blobs()
    tools = dataclasses.replace(trainer_tools(tmp_path, ME, Line()), blobs=blobs)
    faults = 0

    async def run() -> None:
        nonlocal faults
        trainer = Trainer(tools, QuietOutlet())
        found = view_of(1, 2)
        view = View(msgspec.structs.replace(found.snapshot, planned=False), found.plan)
        prepare(trainer, view)
        running = asyncio.create_task(trainer.run())
        try:
            for message in (m for each in valid(view.id) for m in hostile(each)):
                await settle()
                try:
                    await say(trainer, message)
                except PeerFault:
                    faults += 1
            await asyncio.sleep(0.1)
            assert not running.done(), running
        finally:
            running.cancel()
            ended = await asyncio.gather(running, return_exceptions=True)
            await trainer.close()
            await tools.checkpoints.close()
            tools.compute.close()
        assert isinstance(ended[0], asyncio.CancelledError), ended

    asyncio.run(asyncio.wait_for(run(), 60))
    assert faults > 5


def test_nobody_is_two_steps_ahead_of_who_has_a_stage(tmp_path: Path) -> None:
    """It lies, or belongs to somebody else: it is refused, not dropped without a word."""
    tools = dataclasses.replace(trainer_tools(tmp_path, ME, Line()), blobs=Blobs())  # type: ignore[arg-type]

    async def run() -> None:
        outlet: Any = QuietOutlet()
        trainer = Trainer(tools, outlet)
        found = view_of(1, 2)
        view = View(msgspec.structs.replace(found.snapshot, planned=False), found.plan)
        trains(trainer, view)
        ahead = Prepared(view.id, 2, OTHER, {}, 0.0, 0, 0.0, 0, None)
        with pytest.raises(PeerFault, match="Prepared of step 2 while step 0 is not committed"):
            trainer.prepared(stated(ahead))
        await trainer.close()
        await tools.checkpoints.close()
        tools.compute.close()

    asyncio.run(asyncio.wait_for(run(), 60))


async def say(trainer: Trainer, message: Any) -> None:
    """As `Dispatch` does; views that are not known to come are not waited for."""
    if isinstance(message, Prepared):
        trainer.prepared(stated(message))
    elif isinstance(message, CheckpointFiles):
        trainer._tools.checkpoints.remote_files(OTHER, message)
    elif isinstance(message, FrameHeader):
        trainer._followers.gradient(OTHER, message, bytearray(16))
        mailbox = trainer._mail.mailbox(ViewId(message.view_number, message.view_digest))
        if mailbox is not None:
            mailbox.put(OTHER, message, bytearray(16))
    else:
        trainer.following(OTHER, message)
