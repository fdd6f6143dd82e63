"""An explanation speaks of every member, and compares the plan with the alternatives that it
tried."""

import msgspec
import pytest

from p2p_dtfm.core.planner.explain import (
    NO_FASTER,
    SEEN_SLOWER,
    explain,
    explain_peer,
    spare_in_short,
)
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Intent, Link
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, Snapshot
from tests.core.builders import WORKLOAD, device, record
from tests.core.planning import MEBIBYTE, Peer, name_of, workload
from tests.core.planning import snapshot as planned_of


def snapshot_of(*records) -> Snapshot:
    return Snapshot(
        run_digest=records[0].run_digest,
        workload=WORKLOAD,
        number=1,
        previous=GENESIS,
        planned=False,
        records=tuple(records),
        contributors=tuple(Member(r.peer_id, r.life) for r in records),
        absent=(),
        step=0,
        present=None,
    )


def links_to(*names: str) -> dict[str, Link]:
    return {name: Link(1_000_000, 100_000_000) for name in names}


def test_every_member_is_explained_and_alternatives_are_no_better() -> None:
    snapshot = snapshot_of(
        record("a", device=device(speed=4), links=links_to("b", "c", "d")),
        record("b", device=device(speed=4), links=links_to("a", "c", "d")),
        record("c", device=device(speed=1), links=links_to("a", "b", "d")),
        record("d", intent=Intent.SPARE),
    )
    plan = compute_plan(snapshot)
    assert isinstance(plan, Plan)
    explanation = explain(snapshot, plan)
    assert [peer.peer_id for peer in explanation.peers] == ["a", "b", "c", "d"]
    assert explanation.step_ns == plan.predicted_step_ns
    for peer in explanation.peers:
        if peer.alternative is not None and peer.alternative.step_ns is not None:
            assert peer.alternative.step_ns >= explanation.step_ns
    text = explanation.text()
    assert "d: no stage: it is spare" in text
    assert "best rejected alternative" in text


def test_a_single_peer_has_no_alternative() -> None:
    snapshot = snapshot_of(record("a"))
    plan = compute_plan(snapshot)
    assert isinstance(plan, Plan)
    assert explain(snapshot, plan).best_alternative is None


@pytest.mark.parametrize("memory_bytes", [0, 1, 1 << 20])
def test_a_plan_that_stands_is_told_of_though_a_member_offers_less_than_it_takes(
    memory_bytes: int,
) -> None:
    """After a failure the plan in force stays, whatever members offer by then. No dashboard showed
    such a view, since `explain_peer` ended with `AssertionError` at all members."""
    whole = snapshot_of(record("a", links=links_to("b")), record("b", links=links_to("a")))
    before = compute_plan(whole)
    assert isinstance(before, Plan) and len(before.stage_holders()) == 2
    less = record("b", links=links_to("a"), device=device(memory_bytes=memory_bytes))
    later = msgspec.structs.replace(whole, records=(whole.records[0], less), present=before)
    plan = compute_plan(later)
    assert plan == before, "it stands"
    for peer_id in ("a", "b"):
        assert explain_peer(later, before, peer_id).role.startswith("pipeline")
    told = explain(later, before)
    assert told.step_ns == before.predicted_step_ns
    assert told.text().startswith(f"predicted step: {before.predicted_step_ns / 1e6:.1f} ms\n")


def test_a_plan_in_which_somebody_stands_in_is_told_of_as_it_was_made() -> None:
    """The explanation timed its two places as if two peers worked side by side."""
    whole = snapshot_of(record("a", links=links_to("b")), record("b", links=links_to("a")))
    layers, count = whole.workload.layer_count, whole.workload.microbatch_count
    stages = Stage("a", 0, 2, 1), Stage("b", 2, layers, 1)
    alone = Stage("a", 0, 2, 1), Stage("a", 2, layers, 1, stands_in=True)
    plan = Plan((Pipeline(stages, 0, 1), Pipeline(alone, 1, count - 1)), (), 123_000_000)
    told = explain(whole, plan)
    assert told.step_ns == 123_000_000 and told.compute_ns == 0
    assert all(peer.alternative is None for peer in told.peers)


def test_a_spare_that_would_be_worth_less_than_moving_layers_is_told_so() -> None:
    """The explanation said that no place makes a step faster, above a place that does."""
    work = workload(microbatches=64, blocks=22)
    here = [Peer(memory_bytes=1 << 30)] * 2
    two = compute_plan(planned_of(here, work))
    slow = Peer(block_ns=4 * Peer().block_ns, memory_bytes=1 << 27)
    three = planned_of([*here, slow], work, present=two)
    plan = compute_plan(three)
    assert isinstance(plan, Plan) and plan.spares == (name_of(2),)
    for told in (explain_peer(three, plan, name_of(2)), explain(three, plan).peers[2]):
        assert told.alternative is not None and told.alternative.step_ns is not None
        assert told.alternative.step_ns < plan.predicted_step_ns
        assert "% faster, too little to move layers for" in told.role


def test_a_spare_without_room_is_told_that_it_has_none() -> None:
    """The spare was told that the plan is faster without it, and that no place that was tried makes
    the step faster."""
    here, me = [Peer(memory_bytes=1 << 30)] * 2, name_of(2)
    small = planned_of([*here, Peer(memory_bytes=27 * MEBIBYTE)])
    plan = compute_plan(small)
    assert isinstance(plan, Plan) and plan.spares == (me,)
    why = "it offers 27.0 MiB for layers, and the least that it could hold takes 28.0 MiB"
    for told in (explain_peer(small, plan, me), explain(small, plan).peers[2]):
        assert (told.role, told.alternative) == (f"spare: {why}", None)
    assert spare_in_short(small, me, 1) == why
    large = planned_of([*here, Peer(memory_bytes=28 * MEBIBYTE)])
    assert spare_in_short(large, me, 1) == "the plan is faster without this peer"


def test_a_spare_that_others_see_to_be_slower_is_told_so() -> None:
    """The spare was explained by its own word, and read that it would make the swarm 50% faster."""
    work = workload(block_parameters=1 << 10)
    two = compute_plan(planned_of([Peer()] * 2, work))
    three = planned_of([Peer()] * 3, work, present=two)
    paces = {name_of(2): 1000 * 2 * Peer().block_ns}
    seen = [msgspec.structs.replace(record, paces=paces) for record in three.records[:2]]
    three = msgspec.structs.replace(three, records=(*seen, three.records[2]))
    plan = compute_plan(three)
    assert isinstance(plan, Plan) and plan.spares == (name_of(2),)
    for told in (explain_peer(three, plan, name_of(2)), explain(three, plan).peers[2]):
        assert told.role == f"{NO_FASTER}; {SEEN_SLOWER}"
    short = spare_in_short(three, name_of(2), 1)
    assert short == f"the plan is faster without this peer: {SEEN_SLOWER}"


def test_a_spare_whose_line_is_too_slow_for_the_states_is_told_so() -> None:
    """The spare read that it would be worth too little, whatever kept it out."""
    whole = workload(blocks=10, boundary_bytes=1 << 23)
    layer = msgspec.structs.replace(
        whole.block, parameter_count=10_000, state_bytes=4 << 28, frozen_bytes=(4 << 28) - 160_000
    )
    work = msgspec.structs.replace(whole, embedding=layer, block=layer, head=layer)
    one = compute_plan(planned_of([Peer()], work))
    made = planned_of([Peer()] * 2, work, link=Link(20_000_000, 5_000_000), present=one)
    plan = compute_plan(made)
    assert isinstance(plan, Plan) and plan.spares == (name_of(1),)
    assert explain_peer(made, plan, name_of(1)).role.endswith(
        "% faster, but its line is too slow for the states"
    )
