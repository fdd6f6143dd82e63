"""Whatever another peer says, in whatever state this peer is: this peer takes it, or it is the
sender's fault. Nothing else is raised, at once or by a task later. No long text of it is kept, and
it takes no time. Each message comes as from the line: as bytes, through the gate and to the
dispatch."""

import asyncio
import gc
import inspect
import itertools
import logging
import math
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    Gather,
    Heartbeat,
    JoinRequest,
    Ready,
    ReadySet,
    Spread,
    Standing,
    Synced,
    Tidings,
)
from p2p_dtfm.core.messages.audit_messages import (
    Account,
    Audited,
    Claimed,
    HeardClaim,
    Share,
    ShownClaims,
)
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.prepared import (
    Prepared,
    PreparedSteps,
    SignedPrepared,
    sign_prepared,
)
from p2p_dtfm.core.messages.work import Work
from p2p_dtfm.core.protocol import canonical
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.core.recovery.loss_counts import loss_counts
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.dispatch import FOLLOWING
from p2p_dtfm.daemon.peers.wire import (
    CheckpointFiles,
    ConfirmLayers,
    CutBegun,
    CutReceipt,
    FollowDone,
    FollowEnded,
    FollowLayers,
    Hello,
    Introduction,
    Knock,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
    Message,
    Revocations,
    StateDigest,
    TraceRequest,
    TranscriptRequest,
)
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from tests.core.builders import stated
from tests.daemon.listening_daemon import ME, OTHER, Daemon
from tests.daemon.test_cuts import lagging_view
from tests.daemon.trainer_parts import SPEC, QuietOutlet, settle, trainer_tools, view_of
from tests.e2e.test_parity import even_plan

OF_STEPS = {
    *FOLLOWING,
    SignedPrepared,
    PreparedSteps,
    Claimed,
    Audited,
    CheckpointFiles,
    FrameHeader,
}
LONGEST_S = 0.25
"""Processor time of this thread, for one message."""
TRIES = 3
"""Tries of one message: a garbage collection of what earlier tests left may fall into one."""
KEPT_LIMIT_BYTES = 256 << 10
"""Bytes kept of all messages of one type: none of their long texts is kept."""
INTEGERS = (-1, 0, 1, 2, 5, 6, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e300, math.nan, math.inf, -math.inf)
LONG = "x" * 300_000
TEXTS = ("", LONG, "00" * 32, "\0")
SCALARS: dict[type, tuple[Any, ...]] = {
    int: INTEGERS,
    float: FLOATS,
    str: TEXTS,
    bytes: (b"", b"1" * 100_000),
}
LAYERS: tuple[dict[int, int], ...] = (
    {},
    {0: -1},
    {n: 0 for n in range(6)},
    {(1 << 63) - 1: -1},
    {-1: (1 << 63) - 1},
)


def valid(view: ViewId) -> list[Any]:
    """At least one of each type."""
    sender = Member(OTHER, 1)
    signed = Signed(OTHER, "nonsense", b"nonsense", b"1" * 64)
    share = Share("cpu", 1, {0: (b"1",)}, {0: ((b"1",),)})
    prepared = Prepared(view, 0, OTHER, {0: 1.0}, 1.0, 4, 0.0, 0, None)
    account = Account(share, {OTHER: HeardClaim(b"1", b"1" * 64)}, {OTHER: b"1"})
    certificate = Certificate(view, "00" * 32, (sender,), ((sender, b"1" * 64),))
    ready = ReadySet(view, "00" * 32, "00" * 32, ((sender, b"1" * 64),))
    return [
        Hello(PROTOCOL_VERSION, ("/ip4/192.0.2.7/tcp/4001",)),
        Knock(SPEC.digest()),
        Introduction((signed,)),
        Revocations((signed,)),
        Gather(sender, 2, True, GENESIS, 1, (signed,), (sender,), "00" * 32),
        Spread(sender, 2, True, GENESIS, 1, "", (signed,), ready_sets=(ready,), wants=(OTHER,)),
        Tidings(sender, view, ((sender, b"1" * 64),), wants=(OTHER,)),
        Ready(sender, view, "00" * 32, "00" * 32),
        Synced(sender, view),
        Active(sender, view, 0, "00" * 32, certificate=certificate),
        Standing(sender, certificate, True, 0, "00" * 32, (view,), (signed,), (OTHER,)),
        Heartbeat(sender, 1, Work(view, 0), {OTHER: 1}, (OTHER,), {OTHER: 1}),
        JoinRequest(signed, view),
        signed_by_other(prepared),
        signed_by_other(msgspec.structs.replace(prepared, audit=account)),
        PreparedSteps((signed_by_other(prepared).signed,)),
        Claimed(view, 0, share, b"1" * 32, b"1" * 32, b"1" * 32),
        Audited(view, 0, OTHER, b"1" * 32),
        ShownClaims(view, 0, {OTHER: HeardClaim(b"1", b"1" * 64)}),
        FollowLayers(view, 1, {0: -1}, False),
        FollowLayers(view, 1, {0: -1}, True),
        ConfirmLayers(view, 1, (0,)),
        StateDigest(view, 1, 0, 0, b"1" * 16),
        LayerOffered(view, 1, 0, 0, "00" * 32, 100),
        LayersCommitted(view, 1, 0, 1.0),
        LayerReceipt(view, 0, (0,)),
        CutBegun(view, 0, "00" * 32),
        CutReceipt(view, 0, 0, "00" * 32),
        FollowEnded(view, 1, "no reason"),
        FollowDone(view, 1),
        CheckpointFiles(0, "", {0: ("00" * 32, 100)}),
        TraceRequest(0, 1),
        TranscriptRequest(0),
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


def test_every_type_of_message_is_tried() -> None:
    tried = {type(message) for message in valid(GENESIS)} - {FrameHeader}
    assert tried == set(get_args(Message)), "one that is new has an example in `valid`"


def signed_by_other(prepared: Prepared) -> SignedPrepared:
    return SignedPrepared(sign_prepared(prepared, lambda payload: b"1" * 64))


def hostile(message: Any) -> Iterator[Any]:
    """The message itself, and copies with each field in turn set to every value that its type
    allows."""
    yield message
    if isinstance(message, SignedPrepared):  # what is signed is what matters
        for prepared in hostile(decode(message.signed.payload, Prepared)):
            yield signed_by_other(prepared)
    for name in message.__struct_fields__:
        value = getattr(message, name)
        for other in _others(name, value):
            yield msgspec.structs.replace(message, **{name: other})


def _others(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, FrameKind):
        yield from FrameKind
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, ViewId):
        yield from (ViewId(0, ""), ViewId((1 << 64) - 1, "x"), ViewId(value.number, "another"))
        yield ViewId(value.number, LONG)
    elif isinstance(value, msgspec.Struct):
        yield from itertools.islice(hostile(value), 1, None)
    elif isinstance(value, tuple):
        yield from ((), (0,) * 10_000, (-1, (1 << 63) - 1), (LONG,), value * 2000)
        if value and isinstance(value[0], msgspec.Struct):
            yield from ((other,) for other in _others(name, value[0]))
    elif isinstance(value, dict):
        yield from _other_dicts(name, value)
    else:
        yield from SCALARS.get(type(value), ())


def _other_dicts(name: str, value: dict[Any, Any]) -> Iterator[Any]:
    if name == "files":
        yield from ({0: (text, 1 << 62)} for text in TEXTS)
        yield from ({(1 << 63) - 1: ("00" * 32, 1)}, {0: ("00" * 32, -1)})
    elif isinstance(next(iter(value), None), str):
        (some,) = value.values()
        yield from ({}, {LONG: some}, {str(n): some for n in range(10_000)})
    elif name in ("squared_norms", "states", "sums"):
        empty = {"squared_norms": math.nan, "states": b"", "sums": ()}[name]
        yield from (dict.fromkeys(layers, empty) for layers in LAYERS)
    else:
        yield from LAYERS


class Line:
    """A messenger and a bulk plane whose other ends take everything."""

    async def ask(self, peer_id: str, message: Any) -> None: ...

    async def send(self, peer_id: str, lane: str, header: Any, payload: Any) -> None: ...

    def tell(self, peer_id: str, message: Any) -> None: ...


class Blobs:
    """A blob exchange without any blobs."""

    async def fetch_bytes(
        self, digest: str, peers: list[str], max_bytes: int, on_came: Any = None
    ) -> bytes:
        raise BlobUnavailable(digest, {OTHER: "gone"})


def no_view(trainer: Trainer, view: View) -> None: ...


def agreed(trainer: Trainer, view: View) -> None:
    """This peer follows the layers of its place in the next view."""
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


def guards(trainer: Trainer, view: View) -> None:
    """This peer keeps copies of the other peer's layers, which it gets every so often."""
    assert isinstance(view.plan, Plan)
    lags = lagging_view(OTHER, ME)
    lags = View(msgspec.structs.replace(lags.snapshot, planned=False), lags.plan)
    assert isinstance(lags.plan, Plan) and lags.cut_pace is not None
    trainer.view_agreed(lags, False)
    terms, counts = terms_of(SPEC), loss_counts(lags.plan)
    trainer.take_over(lags, 0, Ledger(lags.id, lags.plan, 0, terms, counts), None)


@pytest.fixture
def silence() -> Iterator[None]:
    """Log nothing meanwhile. Loggers remember what is enabled, and `disable` makes them forget
    it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("prepare", [no_view, agreed, trains, guards, stopped, left])
def test_every_message_with_every_value(tmp_path: Path, prepare: Any) -> None:
    """A message's name or view says nothing of its worth: everything signed counts as hostile."""
    torch.set_num_threads(1)
    blobs: Any = Blobs()
    tools = trainer_tools(tmp_path, ME, Line(), blobs)
    faults = 0

    async def run() -> None:
        nonlocal faults
        trainer = Trainer(tools, QuietOutlet())
        found = view_of(1, 2)
        view = View(msgspec.structs.replace(found.snapshot, planned=False), found.plan)
        prepare(trainer, view)
        said_of = trainer._state.view or view
        daemon = Daemon(tmp_path, trainer, tools)
        running = asyncio.create_task(trainer.run())
        try:
            for kind, messages in itertools.groupby(valid(said_of.id), type):
                if kind in OF_STEPS or prepare is no_view:  # others care for no state of a trainer
                    faults += await say_all(daemon, kind, messages)
                    await settle()
            await asyncio.sleep(0.1)
            assert not running.done(), running
        finally:
            running.cancel()
            ended = await asyncio.gather(running, return_exceptions=True)
            await trainer.close()
            await tools.stores.checkpoints.close()
            tools.compute.close()
        assert isinstance(ended[0], asyncio.CancelledError), ended

    asyncio.run(asyncio.wait_for(run(), 120))
    assert faults > 100


async def say_all(daemon: Daemon, kind: type, messages: Iterator[Any]) -> int:
    """Say all messages of one type, with every value; returns how many were refused."""
    faults = 0
    tracemalloc.start()
    try:
        for message in messages:
            for each in hostile(message):
                await asyncio.sleep(0)
                took_s = LONGEST_S
                for _ in range(TRIES):
                    began_s = time.thread_time()
                    is_fault = await refuses(daemon, each)
                    took_s = min(took_s, time.thread_time() - began_s)
                    if took_s < LONGEST_S:
                        break
                assert took_s < LONGEST_S, f"more than {LONGEST_S} s for {each!r:.300}"
                faults += is_fault
                if has_long(each):  # before the next one takes its place
                    assert kept_bytes() < KEPT_LIMIT_BYTES, f"keeps {each!r:.300}"
        assert kept_bytes() < KEPT_LIMIT_BYTES, f"bytes of {kind.__name__} are kept"
    finally:
        tracemalloc.stop()
    return faults


async def refuses(daemon: Daemon, message: Any) -> bool:
    try:
        await daemon.hears(message)
    except PeerFault:
        return True
    return False


def has_long(message: Any) -> bool:
    return LONG in repr(message)


def kept_bytes() -> int:
    """The bytes that long texts of messages still take."""
    found = _found_bytes()
    if found >= KEPT_LIMIT_BYTES:
        gc.collect()  # which takes long
        found = _found_bytes()
    return found


def _found_bytes() -> int:
    lines, first = inspect.getsourcelines(canonical.decode)
    (at,) = [n for n, line in enumerate(lines, first) if "decoder.decode(payload)" in line]
    where = tracemalloc.Filter(True, canonical.__file__, at)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([where]).traces)


def test_nobody_is_two_steps_ahead_of_who_has_a_stage(tmp_path: Path) -> None:
    """Such a peer lies, or its message belongs to somebody else. The message is refused, not
    dropped without a word."""
    tools = trainer_tools(tmp_path, ME, Line(), Blobs())

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
        await tools.stores.checkpoints.close()
        tools.compute.close()

    asyncio.run(asyncio.wait_for(run(), 60))
