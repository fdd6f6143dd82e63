"""Where a run names who alone may hold its first and last stages."""

import random

import msgspec
import pytest

from p2p_dtfm.core.cost_model.guardians import guards_in
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Intent, Link
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Confined, Workload
from tests.core.planning import Peer, name_of, snapshot, workload

WHOLE = workload(blocks=12, microbatches=16)
ONE_LAYER = WHOLE.block.state_bytes + 4 * WHOLE.block.parameter_count + WHOLE.block.saved_bytes
"""What a layer takes in a plan of one pipeline, with its sum."""


def _work(*named: int) -> Workload:
    return msgspec.structs.replace(WHOLE, confined=Confined(ends=tuple(map(name_of, named))))


def _planned(peers: list[Peer], *named: int) -> tuple[Snapshot, Plan]:
    asked = snapshot(peers, _work(*named))
    plan = compute_plan(asked)
    assert isinstance(plan, Plan), plan.reason
    return asked, plan


def _ends(plan: Plan) -> set[str]:
    return {stage.peer_id for p in plan.pipelines for stage in (p.stages[0], p.stages[-1])}


def test_others_are_put_between_the_named_and_make_the_step_shorter() -> None:
    peers = [Peer(memory_bytes=6 * ONE_LAYER)] * 6
    _, plan = _planned(peers, 1, 4)
    assert _ends(plan) == {name_of(1), name_of(4)}
    assert len(plan.stage_holders()) > 2
    refused = compute_plan(snapshot(peers[:1], _work(0)))
    assert isinstance(refused, NoPlan) and "more memory is needed" in refused.reason


def test_one_that_is_named_alone_is_told_that_another_is_missing() -> None:
    """The peers were told that layers do not divide, and to bring memory that changed nothing."""
    here = snapshot([Peer(memory_bytes=6 * ONE_LAYER)] * 6, _work(0))
    refused = compute_plan(here)
    assert isinstance(refused, NoPlan)
    assert "privacy.ends" in refused.reason and "or another one of them" in refused.reason
    assert refused.missing_bytes == (14 - 6) * ONE_LAYER
    room = Peer(memory_bytes=6 * ONE_LAYER + refused.missing_bytes)
    assert isinstance(compute_plan(snapshot([room, *[Peer(memory_bytes=0)] * 5], _work(0))), Plan)


def test_of_an_end_counts_what_those_who_may_have_it_offer() -> None:
    few, many = Peer(memory_bytes=ONE_LAYER // 2), Peer()
    refused = compute_plan(snapshot([few, few, many], _work(0, 1)))
    assert isinstance(refused, NoPlan) and refused.reason.startswith("the embedding needs")
    assert "the largest of 2" in refused.reason


def test_one_that_is_named_and_has_room_may_train_alone() -> None:
    _, plan = _planned([Peer()] * 4, 2)
    assert plan.stage_holders() == (name_of(2),)
    assert set(plan.spares) == {name_of(n) for n in (0, 1, 3)}


@pytest.mark.parametrize("seed", range(12))
def test_in_any_swarm_and_every_plan_that_follows(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(3, 9)
    peers = [
        Peer(chance.randint(1, 9) * 1_000_000, chance.randint(2, 20) * ONE_LAYER)
        for _ in range(count)
    ]
    named = tuple(sorted(chance.sample(range(count), chance.randint(1, count - 1))))
    allowed = set(map(name_of, named))
    asked = snapshot(peers, _work(*named))
    plan = compute_plan(asked)
    if isinstance(plan, NoPlan):
        assert not _fits([peer.memory_bytes // ONE_LAYER for peer in peers], named)
        return
    assert _ends(plan) <= allowed
    _guards_are_named(asked, plan, allowed)
    gone = chance.choice(plan.stage_holders())
    records = tuple(r for r in asked.records if r.peer_id != gone)
    left = msgspec.structs.replace(asked, records=records, present=plan, planned=False, step=3)
    after = compute_plan(left)
    if isinstance(after, Plan):
        assert _ends(after) <= allowed
        _guards_are_named(left, after, allowed)


def _fits(layers_of: list[int], named: tuple[int, ...]) -> bool:
    """Whether any pipeline of these peers can hold 14 layers, with the named ones at its ends."""
    alone = any(layers_of[n] >= 14 for n in named)
    return alone or (len(named) > 1 and sum(layers_of) >= 14)


def _guards_are_named(asked: Snapshot, plan: Plan, allowed: set[str]) -> None:
    guards = guards_in(asked, plan)
    last = asked.workload.layer_count - 1
    assert {guards[layer] for layer in (0, last) if layer in guards} <= allowed


def test_guardians_of_the_ends_are_named_though_others_have_more_room() -> None:
    asked, plan = _planned([Peer(memory_bytes=9 * ONE_LAYER)] * 2 + [Peer()] * 3, 0, 1)
    guards = guards_in(asked, plan)
    last = asked.workload.layer_count - 1
    alone = [n for n in (0, last) if len(plan.holders(n)) == 1]
    assert {guards[n] for n in alone if n in guards} <= {name_of(0), name_of(1)}
    assert all(guards[n] for n in range(1, last) if len(plan.holders(n)) == 1)


def test_where_all_are_named_the_plan_is_as_good_as_where_nobody_is() -> None:
    """Most starting points of the search were left out, and with them most of the search."""
    near, far = Link(2_000_000, 125_000_000), Link(150_000_000, 2_000_000)
    regions, count = 4, 32
    links = {
        (a, b): near if a % regions == b % regions else far
        for a in range(count)
        for b in range(count)
        if a != b
    }
    peers = [Peer(memory_bytes=3 * ONE_LAYER)] * count
    step_ns = []
    for work in (WHOLE, _work(*range(count))):
        plan = compute_plan(snapshot(peers, work, links))
        assert isinstance(plan, Plan)
        step_ns.append(plan.predicted_step_ns)
    assert step_ns[1] <= 1.02 * step_ns[0], step_ns


def test_where_none_of_them_is_here_the_reason_is_said() -> None:
    absent = compute_plan(snapshot([Peer()] * 3, _work(7)))
    assert isinstance(absent, NoPlan)
    assert "none of them is here to train" in absent.reason
    watching = [Peer(), Peer(), Peer(intent=Intent.SPARE)]
    asked = compute_plan(snapshot(watching, _work(2)))
    assert isinstance(asked, NoPlan) and "none of them is here to train" in asked.reason
