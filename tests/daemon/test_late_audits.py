"""Audits of a step that was stopped, and what others are told of these audits meanwhile."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import GONE_LIMIT
from p2p_dtfm.core.audit.earlier_claims import Alike, StoppedStep, WayOfWork, way_of
from p2p_dtfm.core.audit.work import GONE_WORK
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.core.planner.wire_plan import Chunks, WirePlan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.trainer.audited import recomputing as rooms
from p2p_dtfm.daemon.trainer.audited import stopped_steps
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.daemon.trainer.audited.stopped_steps import DENIED, LateWork, StoppedSteps
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.train.stage.replay.arithmetic import max_threads
from tests.core.audit.parts import PLAN, two_by_two
from tests.core.audit.test_earlier_claims import claim, in_a_stage, share_of
from tests.daemon.trainer_parts import QuietOutlet, trainer_tools

NOTHING: Any = None


def audits_in(directory: Path) -> Any:
    tools = trainer_tools(directory, "a", NOTHING, NOTHING)
    return Audits(tools, QuietOutlet(), TrainerState("a"), NOTHING)


def test_who_fetches_what_a_lost_work_has_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for this peer's Prepared, and would take it for a peer that stands still."""
    recomputing, said = audits_in(tmp_path)._recomputing, []

    async def fetched(*what: Any) -> bool:
        said.append(recomputing.fetches)
        return False

    monkeypatch.setattr(rooms, "could_have_shards", fetched)
    stopped = SimpleNamespace(shards_of=lambda it: None)
    late = SimpleNamespace(stopped=SimpleNamespace(plan=PLAN))
    asyncio.run(recomputing._judged_late(NOTHING, late, stopped))
    assert said == [True] and not recomputing.fetches


def test_of_very_many_that_are_gone_some_are_told_of_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More names than allowed make an account false, and with it everybody's Prepared."""
    audits = audits_in(tmp_path)
    gone = [SimpleNamespace(peer_id=f"gone-{n:02}") for n in range(GONE_LIMIT + 3)]

    async def denied(*what: Any) -> bytes:
        return DENIED

    audits._stopped = SimpleNamespace(
        changed=lambda *_: [], sent_other=set, unjudged=lambda *_: gone
    )
    monkeypatch.setattr(audits._recomputing, "of_before", denied)
    snapshot = SimpleNamespace(bars=())
    here = SimpleNamespace(
        book=SimpleNamespace(claims={}),
        plan=PLAN,
        view=SimpleNamespace(snapshot=snapshot),
        step=1,
        engine=SimpleNamespace(states={}),
    )
    found = asyncio.run(audits._otherwise_before(here))
    assert found == {f"gone-{n:02}": GONE_WORK for n in range(GONE_LIMIT)}


def test_who_waits_for_what_one_peer_alone_can_give_names_that_one(tmp_path: Path) -> None:
    """This holds for a frame as well as for a part; what any of several can give counts as fetched.
    Others that take an auditor for one that fetches do not follow it to the peer that it names."""
    recomputing, said = audits_in(tmp_path)._recomputing, []

    async def fetch_bytes(*what: Any) -> bytes:
        said.append((recomputing.lacks, recomputing.fetches))
        return b"frame"

    blobs = SimpleNamespace(fetch_bytes=fetch_bytes)
    recomputing._tools = SimpleNamespace(me="a", net=SimpleNamespace(blobs=blobs))
    due = Lack("d", Kind.ACTIVATION, 3, 1)
    assert asyncio.run(recomputing._fetch(due, "ab" * 32, 5)) == b"frame"
    assert asyncio.run(recomputing._fetch_lent(["d", "e"], "ab" * 32, 5)) == b"frame"
    assert said == [((due,), False), ((), True)]
    assert recomputing.lacks == () and not recomputing.fetches


@pytest.mark.parametrize(("takes_s", "begun"), [(0.9, 9), (4.0, 4)])
def test_who_takes_long_for_the_works_of_others_begins_only_some_of_them(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, begun: int
) -> None:
    """All others would wait for this auditor's word until they were rid of it. Where a member dies
    in a drawn step, there are nine such works."""
    seconds = [0.0]
    monkeypatch.setattr(stopped_steps.now, "monotonic_s", lambda: seconds[0])
    names = [f"peer-{number:02}" for number in range(20)]
    many = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 0, 1) for n in names), (), 1_000_000_000)
    fewer = msgspec.structs.replace(many, pipelines=many.pipelines[1:])
    ways = dict.fromkeys(names, way_of(share_of("d")))
    before = StoppedStep(names[1], 7, "base", many, {}, frozenset(names), ways, was_drawn=True)
    steps = StoppedSteps(NOTHING)
    steps._stopped = [(before, NOTHING)]
    judged = list[str]()
    view: Any = SimpleNamespace(id=ViewId(3, "ab" * 32))
    for late in steps.unjudged(view, fewer, {}, (), range(3)):
        judged.append(late.peer_id)
        seconds[0] += takes_s
    assert len(judged) == begun and judged[0] == names[0], "the one that is gone comes first"


def test_who_does_a_step_again_in_another_way_is_computed_again_though_all_else_is_alike() -> None:
    names = PLAN.stage_holders()
    ways = {it: way_of(share_of(it)) for it in names}
    before = StoppedStep(names[0], 7, "base", PLAN, {}, frozenset(names), ways, was_drawn=True)
    steps, wire = StoppedSteps(NOTHING), WirePlan({}, {})
    steps._stopped, steps._under_way = [(before, wire)], ("base", wire)
    view: Any = SimpleNamespace(id=ViewId(3, "ab" * 32))
    others = {it: msgspec.structs.replace(share_of(it), threads=3) for it in names[:3]}
    said: Any = {it: SimpleNamespace(share=others.get(it, share_of(it))) for it in names}
    late = list(steps.unjudged(view, PLAN, said, (names[1],), range(3)))
    assert [it.peer_id for it in late] == [names[2]], "who is barred already is no matter"
    too_many = ways | {names[2]: WayOfWork("cpu-1", max_threads() + 1)}
    it = LateWork(names[2], dataclasses.replace(before, ways=too_many), wire)
    assert asyncio.run(steps.judged(it, {})) == DENIED, "nobody has computed it so"


def test_where_only_chunks_are_others_what_does_not_depend_on_them_is_compared() -> None:
    seen = list[Any]()

    def changed(claims: Any, alike: Alike, got_states: Any) -> list[str]:
        seen.append(alike)
        return ["d"]

    stopped: Any = SimpleNamespace(plan=PLAN, changed=changed, got_states=lambda *_: ())
    steps, chunks = StoppedSteps(NOTHING), {0: Chunks(((0, 8),), ("a",))}
    steps._stopped, steps._under_way = [(stopped, WirePlan(chunks, {}))], ("", WirePlan({}, {}))
    assert steps.changed(PLAN, {}) == ["d"] and seen == [Alike(chunks=False)]
    fewer = msgspec.structs.replace(PLAN, pipelines=PLAN.pipelines[1:])
    assert steps.changed(fewer, {}) == [] and len(seen) == 1


@pytest.mark.parametrize(
    ("life", "has_moved", "found"), [(1, False, ["b"]), (2, False, []), (1, True, [])]
)
def test_who_got_its_states_since_is_not_held_to_the_parameters_of_before(
    life: int, has_moved: bool, found: list[str]
) -> None:
    """The peer came back after a power cut, in a step that is not its view's first, and its
    guardian gave it false states. It was barred for these."""
    plan, wire = two_by_two(), WirePlan({}, {})
    shares = [
        msgspec.structs.replace(in_a_stage("honest"), parameters={1: word * 32})
        for word in (b"p", b"q")
    ]
    then, now = ({"b": claim("b", share)} for share in shares)
    steps = StoppedSteps(SimpleNamespace(me="a"))  # type: ignore[arg-type]

    def begins(life: int, *step_numbers: int) -> None:
        for step in step_numbers:
            steps.begins(step, "base", wire, [Member("a", 1), Member("b", life)])

    def is_over(plan: Plan) -> None:
        stopped = StoppedStep("a", 7, "base", plan, then, frozenset(), {})
        steps.view_is_over(SimpleNamespace(stopped=lambda *_: stopped))  # type: ignore[arg-type]

    begins(1, 6, 7)
    is_over(plan)
    if has_moved:
        begins(1, 7)
        is_over(PLAN)
    begins(life, 7)
    assert steps.changed(plan, now) == found
