"""The mailbox takes each due frame once. Any other frame is its sender's fault."""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.partial_replay import StageReplay
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.mailbox import STEPS_AHEAD_LIMIT, FrameKey, Mailbox
from p2p_dtfm.daemon.step.neighbours import held_out_indices
from p2p_dtfm.daemon.step.stage_tools import StageLinks, StagePlace, StageTools
from p2p_dtfm.daemon.step.step_engine import StepEngine
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, Payload
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory
from tests.core.builders import run_spec

SPEC = run_spec()  # layers 0-5, 4 microbatches of [2, 32, 32], 2 of evaluation
VIEW = ViewId(2, "ab" * 32)
PLAN = Plan(
    (
        Pipeline((Stage("a", 0, 2, 2), Stage("b", 2, 4, 1), Stage("c", 4, 6, 1)), 0, 3),
        Pipeline((Stage("d", 0, 6, 1),), 3, 1),
    ),
    ("spare",),
    1,
)
BOUNDARY = (2, 32, 32)


def mailbox(me: str = "b", step: int | None = 5) -> Mailbox:
    box = Mailbox(VIEW, PLAN, me, SPEC)
    if step is not None:
        box.begin_step(step)
    return box


def header(kind: FrameKind = FrameKind.ACTIVATION, **changes: object) -> FrameHeader:
    values: dict[str, object] = {
        "view_number": VIEW.number,
        "view_digest": VIEW.snapshot,
        "step": 5,
        "kind": kind,
        "index": 0,
        "layer": 2,
        "codec": "fp32",
        "dtype": "float32",
        "shape": BOUNDARY,
    }
    return FrameHeader(**(values | changes))  # type: ignore[arg-type]


def held(box: Mailbox) -> int:
    return len(box._held) + len(box._seen) + len(box._arrivals)


GRADIENT = FrameKind.ACTIVATION_GRADIENT
PART, SUM = FrameKind.GRADIENT_PART, FrameKind.GRADIENT_SUM
CHUNKS = mailbox().wire.chunks[2]
MINE = next(n for n in range(len(CHUNKS.bounds)) if CHUNKS.owners[n] == "b")
THEIRS = next(n for n in range(len(CHUNKS.bounds)) if CHUNKS.owners[n] == "d")


def chunk_shape(index: int) -> tuple[int]:
    start, end = CHUNKS.bounds[index]
    return (end - start,)


DUE = [
    ("a", header()),
    ("a", header(index=2, step=6)),
    ("a", header(index=4)),  # held-out: every other one, after the four of training
    ("c", header(GRADIENT, layer=4)),
    ("d", header(PART, index=MINE, shape=chunk_shape(MINE))),
    ("d", header(SUM, index=THEIRS, shape=chunk_shape(THEIRS))),
]


@pytest.mark.parametrize("sender, frame", DUE, ids=str)
def test_a_due_frame_is_held_until_it_is_taken(sender: str, frame: FrameHeader) -> None:
    async def scenario() -> None:
        box = mailbox()
        payload = bytearray(b"tensor")
        box.put(sender, frame, payload)
        key = FrameKey(frame.step, frame.kind, frame.layer, frame.index, sender)
        assert await box.take(key) is payload
        assert not box._held and not box._arrivals

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "sender, frame, cause",
    [
        ("stranger", header(), "not due"),
        ("spare", header(), "not due"),
        ("c", header(), "not due"),
        ("a", header(GRADIENT, layer=4), "not due"),
        ("a", header(index=3), "not due"),
        ("a", header(index=5), "not due"),
        ("a", header(index=6), "not due"),
        ("a", header(layer=3), "not due"),
        ("a", header(layer=-1), "not due"),
        ("c", header(GRADIENT, layer=2), "not due"),
        ("c", header(GRADIENT, layer=4, index=4), "not due"),
        ("a", header(shape=(2, 32, 31)), "due is"),
        ("a", header(shape=()), "due is"),
        ("a", header(shape=(2 * 32 * 32,)), "due is"),
        ("a", header(codec="int8"), "due is fp32"),
        ("a", header(codec="raw"), "due is fp32"),
        ("a", header(dtype="float64"), "float32 is due"),
        ("a", header(step=5 + STEPS_AHEAD_LIMIT), "in step 5"),
        ("a", header(step=1 << 50), "in step 5"),
        ("d", header(PART, index=THEIRS, shape=chunk_shape(THEIRS)), "not due"),
        ("d", header(SUM, index=MINE, shape=chunk_shape(MINE)), "not due"),
        ("d", header(PART, index=len(CHUNKS.bounds), shape=(1,)), "not due"),
        ("d", header(PART, index=MINE, layer=0, shape=chunk_shape(MINE)), "not due"),
        ("c", header(PART, index=MINE, shape=chunk_shape(MINE)), "not due"),
        ("d", header(PART, index=MINE, shape=(1,)), "due is"),
        ("a", header(FrameKind.LAYER_STATE), "not due"),
        ("a", header(FrameKind.LAYER_STATE), "not due"),
        ("a", header(FrameKind.LAYER_GRADIENT), "not due"),
        ("stranger", header(step=1), "not due"),
    ],
    ids=str,
)
def test_what_is_not_due_is_a_fault_of_its_sender(
    sender: str, frame: FrameHeader, cause: str
) -> None:
    box = mailbox()
    with pytest.raises(PeerFault, match=cause) as caught:
        box.put(sender, frame, bytearray())
    assert caught.value.peer_id == sender
    assert held(box) == 0


def test_a_frame_twice_is_a_fault_even_after_it_was_taken() -> None:
    async def scenario() -> None:
        box = mailbox()
        box.put("a", header(), bytearray())
        with pytest.raises(PeerFault, match="twice"):
            box.put("a", header(), bytearray())
        await box.take(FrameKey(5, FrameKind.ACTIVATION, 2, 0, "a"))
        with pytest.raises(PeerFault, match="twice"):
            box.put("a", header(), bytearray())

    asyncio.run(scenario())


def test_a_late_frame_of_a_finished_step_is_dropped_without_blame() -> None:
    box = mailbox()
    box.put("a", header(step=4), bytearray())
    assert held(box) == 0


def test_a_new_step_forgets_the_old_one() -> None:
    box = mailbox()
    box.put("a", header(), bytearray())
    box.put("a", header(step=6), bytearray())
    box.begin_step(6)
    taken = box.take_arrivals(6, range(4))
    assert [key.step for key, _ in taken] == [6]
    box.begin_step(7)
    assert held(box) == 0


def test_before_its_first_step_it_holds_no_more_steps_than_later() -> None:
    box = mailbox(step=None)
    for step in range(STEPS_AHEAD_LIMIT):
        box.put("a", header(step=step), bytearray())
    with pytest.raises(PeerFault, match="before the first one"):
        box.put("a", header(step=99), bytearray())


def test_what_came_before_the_first_step_and_is_of_none_that_is_near_is_not_kept() -> None:
    """A sender that invents two steps beside its real ones had four held for the whole view."""
    box = mailbox(step=None)
    for step in (10**12, 10**12 + 1):
        box.put("a", header(step=step), bytearray())
    box.put("c", header(GRADIENT, layer=4), bytearray())
    too_far = box.begin_step(5)
    assert too_far.keys() == {"a"} and too_far["a"] >= 10**12
    assert [key.sender for key in box._held] == ["c"]
    for step in (5, 6):
        box.put("a", header(step=step), bytearray())
    assert {key.step for key in (*box._held, *box._seen, *box._arrivals)} == {5, 6}
    assert not box.begin_step(6)


def test_who_has_sent_what_belongs_to_no_step_is_told_of_as_the_first_one_begins() -> None:
    told: list[str] = []

    async def scenario() -> None:
        box = mailbox(step=None)
        box.put("a", header(step=99), bytearray())
        compute = Compute()
        frames = StepFrames(VIEW, NoTransport(), lambda *_: None, lambda who, _: told.append(who))
        engine = StepEngine(
            StagePlace(PLAN, "b", SPEC),
            {layer: LayerState.genesis(SPEC, layer) for layer in PLAN.layers_of("b")},
            StageLinks(box, frames),
            StageTools(compute, ReplicaMemory(), lambda step, number: None),
        )
        running = asyncio.create_task(engine.run(5, train=True, evaluate=False))
        while box._step is None:
            await asyncio.sleep(0)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        compute.close()

    asyncio.run(scenario())
    assert told == ["a"]


class NoTransport:
    async def send(
        self, peer_id: str, lane: str, header: FrameHeader, payload: Payload
    ) -> None: ...


def test_someone_who_waits_is_woken_by_the_frame() -> None:
    async def scenario() -> None:
        box = mailbox()
        waiting = asyncio.create_task(box.take(FrameKey(5, FrameKind.ACTIVATION, 2, 4, "a")))
        await asyncio.sleep(0)
        box.put("a", header(index=4), bytearray(b"x"))
        assert await waiting == b"x"
        assert not box._held and not box._waiting

    asyncio.run(scenario())


def test_a_frame_for_someone_who_gave_up_waiting_is_not_lost() -> None:
    async def scenario() -> None:
        box = mailbox()
        key = FrameKey(5, FrameKind.ACTIVATION, 2, 4, "a")
        waiting = asyncio.create_task(box.take(key))
        await asyncio.sleep(0)
        waiting.cancel()
        box.put("a", header(index=4), bytearray(b"x"))
        assert await box.take(key) == b"x"

    asyncio.run(scenario())


frames = st.builds(
    lambda sender, kind, index, layer, step, shape: (
        sender,
        header(kind, index=index, layer=layer, step=step, shape=shape),
    ),
    st.sampled_from(["a", "c", "d", "stranger"]),
    st.sampled_from(list(FrameKind)),
    st.integers(0, 7),
    st.integers(-1, 6),
    st.integers(3, 9),
    st.sampled_from([BOUNDARY, (1,), *(chunk_shape(n) for n in range(len(CHUNKS.bounds)))]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(frames, max_size=60), st.lists(frames, max_size=60), st.booleans())
def test_whatever_comes_it_holds_at_most_what_two_steps_need(
    early: list, later: list, begins: bool
) -> None:
    box, per_step = mailbox(step=None), 3 + len(held_out_indices(PLAN, SPEC, 0)) + 3
    per_step += len(CHUNKS.bounds)
    for sent in (early, later):
        for sender, frame in sent:
            try:
                box.put(sender, frame, bytearray())
            except PeerFault as fault:
                assert fault.peer_id == sender
        assert len(box._held) <= STEPS_AHEAD_LIMIT * per_step
        assert len(box._seen) == len(box._held)
        if begins:
            for sender, step in box.begin_step(5).items():
                assert any(it[0] == sender and it[1].step == step for it in early)
            assert {key.step for key in box._held} <= set(range(5, 5 + STEPS_AHEAD_LIMIT))


def test_held_out_microbatches_go_round_the_pipelines_and_leave_none_out() -> None:
    for sequences in (2, 4, 6, 14):
        evaluation = SPEC.evaluation.model_copy(update={"sequences": sequences})
        spec = SPEC.model_copy(update={"evaluation": evaluation})
        shares = [held_out_indices(PLAN, spec, pipeline) for pipeline in (0, 1)]
        assert sorted(n for share in shares for n in share) == list(range(4, 4 + sequences // 2))


@pytest.mark.parametrize(
    "me, own",
    [("a", lambda f: msgspec.structs.replace(f, layer=0)), ("d", lambda f: f)],
)
def test_who_has_the_embedding_is_due_no_activation(
    me: str, own: Callable[[FrameHeader], FrameHeader]
) -> None:
    box = mailbox(me)
    for sender in "abcd":
        with pytest.raises(PeerFault, match="not due"):
            box.put(sender, own(header()), bytearray())


MENDED = Plan(
    (
        Pipeline((Stage("a", 0, 2, 2), Stage("b", 2, 4, 1), Stage("c", 4, 6, 1)), 0, 3),
        Pipeline(
            (Stage("d", 0, 2, 1), Stage("b", 2, 4, 1, stands_in=True), Stage("e", 4, 6, 1)), 3, 1
        ),
    ),
    (),
    1,
)


def test_who_stands_in_gets_each_pipelines_tensors_from_its_own_neighbours() -> None:
    box = Mailbox(VIEW, MENDED, "b", SPEC)
    box.replay(5, StageReplay((0, 3, 1, 2), forwards=1, stood_in=(frozenset({3, 2}),)))
    due = [
        ("a", header(index=1)),
        ("d", header(index=3)),
        ("d", header(index=2)),
        ("c", header(GRADIENT, layer=4, index=0)),
        ("e", header(GRADIENT, layer=4, index=2)),
        ("d", header(index=3, step=6)),
        ("a", header(index=4)),
        ("d", header(index=5)),
    ]
    for sender, frame in due:
        box.put(sender, frame, bytearray(1))
    refused = [
        ("a", header(index=0)),
        ("a", header(index=2)),
        ("a", header(index=5)),
        ("d", header(index=1)),
        ("d", header(index=2, step=6)),
        ("c", header(GRADIENT, layer=4, index=3)),
        ("e", header(GRADIENT, layer=4, index=1)),
    ]
    for sender, frame in refused:
        with pytest.raises(PeerFault, match="not due"):
            box.put(sender, frame, bytearray(1))


def test_of_a_step_that_goes_on_only_what_is_missing_comes() -> None:
    """b has forwarded 0 and 3, and has the gradient of 0. In the plan 3 belongs to another
    pipeline."""
    box = mailbox()
    box.replay(5, StageReplay((0, 3, 1), forwards=2, backwards=1))
    box.put("a", header(index=1), bytearray(1))
    box.put("c", header(GRADIENT, layer=4, index=3), bytearray(1))
    box.put("a", header(index=4), bytearray(1))
    refused = [
        ("a", header(index=0)),
        ("a", header(index=3)),
        ("a", header(index=2)),
        ("c", header(GRADIENT, layer=4, index=0)),
    ]
    for sender, frame in refused:
        with pytest.raises(PeerFault, match="not due"):
            box.put(sender, frame, bytearray(1))
    box.put("a", header(index=2, step=6), bytearray(1))
    with pytest.raises(PeerFault, match="not due"):
        box.put("a", header(index=3, step=6), bytearray(1))


AUDITED = run_spec(audit={"rate": 0.1})
TOLD = bytes(16)
ROW = Plan(
    (Pipeline((Stage("a", 0, 2, 2), Stage("b", 2, 4, 1), Stage("c", 4, 6, 1)), 0, 4),), (), 1
)
HEADS = msgspec.structs.replace(
    PLAN, pipelines=(Pipeline((Stage("b", 0, 6, 1),), 0, 3), PLAN.pipelines[1])
)
"""b and d have the head."""


def audited(plan: Plan) -> tuple[Mailbox, Callable[[int], tuple[int]]]:
    box = Mailbox(VIEW, plan, "b", AUDITED)
    box.begin_step(5)
    chunks = box.wire.chunks.get(0)

    def shape(index: int) -> tuple[int]:
        assert chunks is not None
        start, end = chunks.bounds[index]
        return (end - start,)

    return box, shape


def test_who_has_the_head_tells_of_its_losses_on_all_that_is_reduced_with_it() -> None:
    box, shape = audited(HEADS)
    owners = box.wire.chunks[0].owners
    part, total = owners.index("b"), owners.index("d")
    due = [
        header(PART, layer=0, index=part, shape=shape(part)),
        header(SUM, layer=0, index=total, shape=shape(total)),
    ]
    for frame in due:
        with pytest.raises(PeerFault, match="without the losses that are due"):
            box.put("d", frame, bytearray())
    assert box.losses_told(5, "d") == b""
    box.put("d", msgspec.structs.replace(due[0], losses=TOLD), bytearray())
    with pytest.raises(PeerFault, match="unlike losses"):
        box.put("d", msgspec.structs.replace(due[1], losses=b"l" * 16), bytearray())
    box.put("d", msgspec.structs.replace(due[1], losses=TOLD), bytearray())
    assert box.losses_told(5, "d") == TOLD and box.losses_told(6, "d") == b""
    box.begin_step(6)
    assert box.losses_told(5, "d") == b""


def test_who_has_the_head_alone_tells_of_them_with_the_last_gradient() -> None:
    box, _ = audited(ROW)
    for number in range(3):
        frame = header(GRADIENT, layer=4, index=number)
        with pytest.raises(PeerFault, match="with losses that are not due"):
            box.put("c", msgspec.structs.replace(frame, losses=TOLD), bytearray())
        box.put("c", frame, bytearray())
    last = header(GRADIENT, layer=4, index=3)
    with pytest.raises(PeerFault, match="without the losses that are due"):
        box.put("c", last, bytearray())
    box.put("c", msgspec.structs.replace(last, losses=TOLD), bytearray())
    assert box.losses_told(5, "c") == TOLD
    with pytest.raises(PeerFault, match="not due"):
        box.put("a", header(losses=TOLD), bytearray())
    with pytest.raises(PeerFault, match="not due"):
        mailbox().put("c", header(GRADIENT, layer=4, losses=TOLD), bytearray())
