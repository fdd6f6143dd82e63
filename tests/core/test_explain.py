"""An explanation speaks of every member, and compares with the alternatives that it tried."""

import msgspec
import pytest

from p2p_dtfm.core.planner.explain import explain, explain_peer
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent, Link
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, Snapshot
from tests.core.builders import WORKLOAD, device, record


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
    """After a failure the plan in force stays, whatever members offer by then: no dashboard showed
    such a view, since `explain_peer` ended with `AssertionError` at all of them."""
    whole = snapshot_of(record("a", links=links_to("b")), record("b", links=links_to("a")))
    before = compute_plan(whole)
    assert isinstance(before, Plan) and len(before.stage_holders()) == 2
    less = record("b", links=links_to("a"), device=device(memory_bytes=memory_bytes))
    later = msgspec.structs.replace(whole, records=(whole.records[0], less), present=before)
    plan = compute_plan(later)
    assert plan == before, "it stands"
    for peer_id in ("a", "b"):
        assert explain_peer(later, before, peer_id).role.startswith("pipeline")
