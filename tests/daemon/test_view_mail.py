"""Frames for a view that this peer has not taken over wait until it is known what is due."""

import asyncio
import math

import msgspec
import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.partial_replay import NOTHING, PartialReplay, PipelineReplay
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.lane_frames import (
    CHUNK_LIMIT_BYTES,
    KINDS,
    frame_limits,
    require_of_lane,
)
from p2p_dtfm.daemon.trainer import view_mail
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.daemon.trainer.view_mail import ViewMail
from p2p_dtfm.net.streams.frames import WHOLE, FrameHeader, FrameKind
from tests.core.planning import name_of
from tests.daemon.trainer_parts import ME, SPEC, view_of

SENDER = name_of(1)


def view(planned: bool) -> View:
    found = view_of(1, 2)
    return View(msgspec.structs.replace(found.snapshot, planned=planned), found.plan)


def test_tensors_of_a_repeated_step_wait_for_what_is_kept_of_it() -> None:
    """A faster peer sends before this peer knows which microbatches its pipeline computes."""

    async def run() -> None:
        mail, repeated = ViewMail(ME, SPEC, TrainerState()), view(planned=False)
        assert isinstance(repeated.plan, Plan)
        mail.agreed(repeated)
        waiting = asyncio.create_task(mail.until_known(repeated.id, SENDER))
        await asyncio.sleep(3 * view_mail.UNKNOWN_VIEW_POLL_S)
        assert not waiting.done()
        order = tuple(reversed(repeated.plan.pipelines[0].microbatches))
        kept = PipelineReplay(order, (NOTHING, NOTHING))
        mail.take_over(repeated, PartialReplay(0, (kept,), 0, 0))
        await asyncio.wait_for(waiting, 5)

    asyncio.run(run())


def test_tensors_of_a_planned_view_are_taken_as_soon_as_it_is_agreed() -> None:
    async def run() -> None:
        mail, planned = ViewMail(ME, SPEC, TrainerState()), view(planned=True)
        mail.agreed(planned)
        await asyncio.wait_for(mail.until_known(planned.id, SENDER), 5)
        mail.take_over(planned, None)
        await asyncio.wait_for(mail.until_known(planned.id, SENDER), 5)

    asyncio.run(run())


def test_a_view_that_never_comes_is_its_senders_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_mail, "UNKNOWN_VIEW_WAIT_S", 0.05)
    state = TrainerState()
    state.view = view(True)
    with pytest.raises(PeerFault, match="does not know"):
        next_one = ViewId(state.view.id.number + 1, "another")
        asyncio.run(ViewMail(ME, SPEC, state).until_known(next_one, SENDER))


def header_of(
    view_id: ViewId, payload_bytes: int, part: int = WHOLE, kind: FrameKind = FrameKind.ACTIVATION
) -> FrameHeader:
    shape = (payload_bytes // 4,)
    header = FrameHeader(
        view_id.number, view_id.snapshot, 0, kind, 0, 1, "fp32", "float32", shape, payload_bytes
    )
    return msgspec.structs.replace(header, part=part)


def test_what_is_large_of_a_view_that_nobody_knows_waits_before_memory_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that invents a view may claim any size for its tensors: two parts held 128 MiB."""
    monkeypatch.setattr(view_mail, "EARLY_WAIT_S", 0.1)
    small, large = view_mail.EARLY_LIMIT_BYTES, view_mail.EARLY_LIMIT_BYTES + 4

    async def run() -> None:
        state = TrainerState()
        state.view = view(True)
        mail, invented = ViewMail(ME, SPEC, state), ViewId(state.view.id.number + 1, "invented")
        mail.take_over(state.view, None)
        assert mail.admit(invented, SENDER, header_of(invented, small)) is None
        for kind in FrameKind:
            for header in (header_of(invented, large, kind=kind), header_of(invented, 4, 0, kind)):
                waiting = mail.admit(invented, SENDER, header)
                assert waiting is not None
                with pytest.raises(PeerFault, match="does not know"):
                    await waiting

    asyncio.run(run())


def test_what_waits_is_looked_at_once_its_view_is_known() -> None:
    async def run() -> None:
        mail, planned = ViewMail(ME, SPEC, TrainerState()), view(planned=True)
        waiting = mail.admit(planned.id, SENDER, header_of(planned.id, 1 << 21))
        assert waiting is not None
        task = asyncio.ensure_future(waiting)
        await asyncio.sleep(2 * view_mail.UNKNOWN_VIEW_POLL_S)
        assert not task.done()
        mail.agreed(planned)
        with pytest.raises(PeerFault, match="due"):
            await asyncio.wait_for(task, 5)
        with pytest.raises(PeerFault, match="due"):
            mail.admit(planned.id, SENDER, header_of(planned.id, 1 << 21))
        state_of_a_layer = header_of(planned.id, 1 << 21, kind=FrameKind.LAYER_STATE)
        assert mail.admit(planned.id, SENDER, state_of_a_layer) is None

    asyncio.run(run())


def test_no_lane_carries_more_than_the_run_has() -> None:
    at_most = frame_limits(workload_of(SPEC)).payload_bytes
    assert at_most == CHUNK_LIMIT_BYTES < 5 << 20, "of a small run"
    some = ViewId(1, "any")
    for lane, kinds in KINDS.items():
        for kind in FrameKind:
            header = header_of(some, CHUNK_LIMIT_BYTES, kind=kind)
            if kind in kinds:
                require_of_lane(SENDER, lane, header)
            else:
                with pytest.raises(PeerFault, match="on the lane"):
                    require_of_lane(SENDER, lane, header)
    for lane in ("reduce", "state"):
        with pytest.raises(PeerFault, match="bytes"):
            header = header_of(some, CHUNK_LIMIT_BYTES + 1, kind=KINDS[lane][0])
            require_of_lane(SENDER, lane, header)
    large = SPEC.model_copy(update={"batch": SPEC.batch.model_copy(update={"microbatch": 1 << 14})})
    boundary = math.prod(large.boundary_shape(1)) * 4
    assert boundary < frame_limits(workload_of(large)).payload_bytes < boundary + (1 << 20)


def test_who_has_come_back_in_no_view_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an older disk the peer does not know in which views it was; the others are in them
    still."""
    monkeypatch.setattr(view_mail, "UNKNOWN_VIEW_WAIT_S", 0.05)
    mail = ViewMail(ME, SPEC, TrainerState())
    assert asyncio.run(mail.until_known(view(True).id, SENDER)) is False


def test_what_was_due_in_a_former_life_is_nobodys_fault_once_a_later_view_has_taken_over() -> None:
    """The frame lay in a neighbour's lane while this peer was away. Once dropped, it costs nobody a
    step."""
    state, later = TrainerState(), view_of(6, 2)
    mail = ViewMail(ME, SPEC, state)
    state.view = later
    mail.take_over(later, None)
    before, after = ViewId(3, "a former life"), ViewId(5, "another")
    for old in (before, after):
        mail.require_possible(old, SENDER)
        assert asyncio.run(mail.until_known(old, SENDER)) is False
    state.view = newest = view_of(9, 2)
    mail.take_over(newest, None)
    with pytest.raises(PeerFault, match="cannot be"):
        mail.require_possible(ViewId(6, "never was"), SENDER)
    with pytest.raises(PeerFault, match="does not know"):
        asyncio.run(mail.until_known(ViewId(6, "never was"), SENDER))


def test_who_was_in_a_view_that_never_took_over_here_is_not_to_blame() -> None:
    """All had said Ready to the view, and one of these words was late at this peer alone. Before it
    came a member failed, and all went on in a later view. What the others had sent meanwhile lay in
    their lanes, and each of them was cut off for it."""
    state, before, missed = TrainerState(), view_of(6, 2), ViewId(7, "missed")
    mail = ViewMail(ME, SPEC, state)
    state.view = before
    mail.take_over(before, None)

    async def run() -> None:
        waiting = asyncio.create_task(mail.until_known(missed, SENDER))
        await asyncio.sleep(2 * view_mail.UNKNOWN_VIEW_POLL_S)
        assert not waiting.done()
        state.view = later = view_of(9, 2)
        mail.take_over(later, None)
        assert await asyncio.wait_for(waiting, 5) is False
        assert mail.admit(missed, SENDER, header_of(missed, 4)) is None
        assert await mail.until_known(missed, SENDER) is False

    asyncio.run(run())
    for number in range(10, 10 + view_mail.VIEWS_REMEMBERED):
        state.view = later = view_of(number, 2)
        mail.take_over(later, None)
    with pytest.raises(PeerFault, match="cannot be"):
        mail.require_possible(missed, SENDER)
