"""A swarm that stands still goes on with the peers that have the states; better plans come while it
trains."""

import msgspec
import pytest

from p2p_dtfm.core.planner.planner import compute_plan, fixed_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.snapshot import HeldLayer, Snapshot
from tests.core.planning import Peer, name_of, snapshot, workload

STEP = 5
SLOW = Link(round_trip_ns=20_000_000, bytes_per_s=10_000_000)
"""A layer's state takes 10 s, a boundary tensor a millisecond, and a step of one peer alone 2 s."""
WORK = workload(boundary_bytes=10_000, block_parameters=8 << 20)


def without(
    lost: int, stage_counts: tuple[int, ...], peer_count: int, guards: dict[int, int] | None = None
) -> tuple[Snapshot, Plan]:
    """A snapshot after a stage-holder's death, and the plan that failed. `guards`: which peer has
    whose layers besides its own."""
    made = snapshot([Peer()] * peer_count, WORK, link=SLOW)
    plan = fixed_plan(made, stage_counts)
    held = [
        HeldLayer(holder, layer, STEP)
        for number in range(peer_count)
        for holder in [name_of(number)]
        for owner in [number, *([guards[number]] if guards and number in guards else [])]
        for layer in plan.layers_of(name_of(owner))
        if number != lost
    ]
    records = tuple(record for record in made.records if record.peer_id != name_of(lost))
    changed = {"present": plan, "planned": False, "step": STEP, "held": tuple(held)}
    return msgspec.structs.replace(made, records=records, **changed), plan


def moved(failed: Snapshot, plan: Plan) -> set[str]:
    states = failed.states()
    return {
        stage.peer_id
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if not states.get(stage.peer_id, set()).issuperset(stage.layers)
    }


def test_a_spare_that_has_no_state_comes_in_with_the_next_view() -> None:
    failed, _ = without(1, (3,), 4, {0: 1})
    first = compute_plan(failed)
    assert isinstance(first, Plan) and first.provisional
    assert first.spares == (name_of(3),) and not moved(failed, first)
    fast = msgspec.structs.replace(SLOW, bytes_per_s=500_000_000)  # gradients fill a slow line
    records = tuple(
        msgspec.structs.replace(record, links=dict.fromkeys(record.links, fast))
        for record in failed.records
    )
    planned = msgspec.structs.replace(failed, planned=True, present=first, records=records)
    second = compute_plan(planned)
    assert isinstance(second, Plan) and not second.provisional
    assert second.spares == ()
    again = compute_plan(msgspec.structs.replace(planned, present=second))
    assert again == second


@pytest.mark.parametrize(("guardian", "lost"), [(1, 0), (0, 1), (1, 2), (2, 1)])
def test_a_neighbour_that_guards_them_takes_the_lost_layers(guardian: int, lost: int) -> None:
    failed, plan = without(lost, (3,), 3, {guardian: lost})
    found = compute_plan(failed)
    assert isinstance(found, Plan)
    assert not moved(failed, found)
    layers = {*plan.layers_of(name_of(lost)), *plan.layers_of(name_of(guardian))}
    assert set(found.layers_of(name_of(guardian))) == layers


def test_what_moves_is_waited_for_where_a_step_without_it_takes_longer() -> None:
    """The one whole pipeline that is left is a hundred times slower than all others."""
    failed, _ = without(0, (4, 1), 5)
    device = failed.records[-1].device
    hundredfold = {
        kind: msgspec.structs.replace(
            getattr(device, kind),
            **{
                name: 100 * ns for name, ns in msgspec.structs.asdict(getattr(device, kind)).items()
            },
        )
        for kind in ("embedding", "block", "head")
    }
    slow = msgspec.structs.replace(device, **hundredfold)
    records = (*failed.records[:-1], msgspec.structs.replace(failed.records[-1], device=slow))
    found = compute_plan(msgspec.structs.replace(failed, records=records))
    assert isinstance(found, Plan) and moved(failed, found)


def test_a_failure_of_no_stage_keeps_what_is_provisional() -> None:
    failed, _ = without(1, (3,), 4, {0: 1})
    first = compute_plan(failed)
    assert isinstance(first, Plan)
    stood = compute_plan(msgspec.structs.replace(failed, present=first))
    assert stood == first and first.provisional
