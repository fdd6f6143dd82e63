"""What a peer tells of what it lacks, where it lacks more than it tells."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dtfm.core.messages.work import LACKS_LIMIT, Kind, Lack
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.mailbox import FrameKey
from p2p_dtfm.daemon.trainer.step_waits import StepWaits
from p2p_dtfm.net.streams.frames import FrameKind
from tests.daemon.trainer_parts import SPEC, view_of

NAMES = ("me", "y", "z")


REPLICAS = Plan(tuple(Pipeline((Stage(n, 0, 4, 1),), i, 1) for i, n in enumerate(NAMES)), (), 1)


def waits_of(keys: list[FrameKey], plan: Plan = REPLICAS, gave_to: str = "") -> StepWaits:
    view = View(view_of(1, 2).snapshot, plan)
    frames = SimpleNamespace(
        is_writing_to=lambda peer_id: False, has_given=lambda *frame: frame[0] == "z"
    )
    wire = SimpleNamespace(chunks={0: SimpleNamespace(owners=("me", "y", "z"))})
    mailbox = SimpleNamespace(lacks=lambda: keys, wire=wire)
    engine = SimpleNamespace(view=view.id, frames=frames, mailbox=mailbox)
    state = SimpleNamespace(
        view=view, stopped=False, step=3, fetches=False, restarts=(), ledger=None, replay=None
    )
    net = SimpleNamespace(
        blobs=SimpleNamespace(gave_lately=lambda peer_id: peer_id == gave_to),
        bulk=SimpleNamespace(unacknowledged_bytes=lambda peer_id, lane: 0),
    )
    tools = SimpleNamespace(
        me="me",
        net=net,
        spec=SPEC.model_copy(update={"total_steps": 10}),
        compute=SimpleNamespace(is_idle=True),
    )
    steps = SimpleNamespace(engine=engine, audits=SimpleNamespace(fetches=False))
    return StepWaits(*(cast(Any, it) for it in (tools, state, steps, SimpleNamespace())))


def test_whose_part_is_lacked_is_told_before_whose_sums() -> None:
    """One of many replicas hangs before its part, so all lack the sums of all. Of those that wait
    for a part, only that replica is in the way."""
    sums = [FrameKey(3, FrameKind.GRADIENT_SUM, 0, n, f"a-{n:02}") for n in range(30)]
    hangs = FrameKey(3, FrameKind.GRADIENT_PART, 0, 7, "z")
    work = waits_of([*sums, hangs]).work(())
    assert work is not None and len(work.lacks) == LACKS_LIMIT
    assert (work.lacks[0].peer_id, work.lacks[0].kind) == ("z", Kind.PART)


def test_of_a_part_that_others_add_up_nobody_is_owed_more_than_an_answer() -> None:
    """A peer that computes a work again is shown the part as soon as it asks. A peer that says for
    long that it lacks the part, and has fetched nothing here, has not asked."""
    others, mine = Lack("me", Kind.PART, 0, 1), Lack("me", Kind.PART, 0, 2)
    assert waits_of([]).has_given("z", others)
    assert not waits_of([], gave_to="z").has_given("z", others), "it may be on its way"
    assert waits_of([]).has_given("z", mine) and not waits_of([]).has_given("y", others)


def test_nor_of_a_frame_that_went_to_another() -> None:
    frame = Lack("me", Kind.ACTIVATION, 2, 3)
    assert waits_of([]).has_given("z", frame)
    assert not waits_of([], gave_to="z").has_given("z", frame), "it may be on its way"


@pytest.mark.parametrize(
    "lack",
    [
        Lack("me", Kind.PART, 0, 9),
        Lack("me", Kind.PART, 5, 0),
        Lack("me", Kind.SUM, 0, 1),
        Lack("me", Kind.SUM, 5, 0),
        Lack("me", Kind.ACTIVATION, 0, 0),
        Lack("me", Kind.GRADIENT, 0, 99),
    ],
)
def test_what_the_plan_does_not_know_was_never_due(lack: Lack) -> None:
    assert waits_of([]).has_given("y", lack)
    assert not waits_of([]).has_given("y", Lack("me", Kind.SUM, 0, 0)), "that one is"


def test_between_neighbours_what_goes_from_one_to_the_other_is_due() -> None:
    stages = (Stage("me", 0, 2, 1), Stage("y", 2, 4, 1))
    waits = waits_of([], Plan((Pipeline(stages, 0, 4),), (), 1))
    assert not waits.has_given("y", Lack("me", Kind.ACTIVATION, 2, 3))
    assert not waits.has_given("y", Lack("me", Kind.ACTIVATION, 2, 5)), "one that is evaluated"
    assert waits.has_given("y", Lack("me", Kind.ACTIVATION, 2, 6))
    assert waits.has_given("y", Lack("me", Kind.GRADIENT, 2, 3)), "it goes the other way"
