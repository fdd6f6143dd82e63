"""A view as the dashboard shows it: flows add up, and this peer's part is what the plan says."""

import itertools

import msgspec
import pytest

from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.planner import compute_plan
from p2p_dtfm.core.view import View
from p2p_dtfm.daemon.view_facts import points_of, view_state
from p2p_dtfm.sim.named_plans import grid_plan
from tests.core.planning import Peer, name_of, snapshot, workload

STEP_NS = 2_000_000_000


def planned(count: int, stages: int, spares: int = 0) -> View:
    """Pipelines of `stages` equal peers, and spares after them."""
    shot = snapshot([Peer() for _ in range(count + spares)], workload())
    names = tuple(map(name_of, range(count)))
    grid = grid_plan(names, shot.workload, stages)
    idle = tuple(map(name_of, range(count, count + spares)))
    plan = msgspec.structs.replace(grid, spares=idle, predicted_step_ns=STEP_NS)
    return View(shot, plan)


def test_every_member_has_its_place() -> None:
    view = planned(4, stages=2, spares=1)
    assert isinstance(view.plan, Plan)
    state = view_state(view, name_of(2), from_step=7)
    assert state.me == 2 and state.from_step == 7 and state.number == view.id.number
    for peer in state.peers:
        place = view.plan.place_of(peer.peer_id)
        assert (peer.pipeline, peer.position) == (place or (None, None))
        assert range(peer.first_layer, peer.end_layer) == view.plan.layers_of(peer.peer_id)
    for facts, pipeline in zip(state.pipelines, view.plan.pipelines, strict=True):
        named = [state.peers[number].peer_id for number in facts.peers]
        assert named == [stage.peer_id for stage in pipeline.stages]


def test_flows_are_activations_and_gradients() -> None:
    """Reduction of a segment among n holders moves 2 (n-1)/n of its bytes out of each of them."""
    view = planned(3, stages=1)
    state = view_state(view, name_of(0), from_step=0)
    work = view.snapshot.workload
    model_bytes = 4 * sum(work.cost(layer).parameter_count for layer in range(work.layer_count))
    out_of_first = sum(flow.bytes_per_step for flow in state.flows if 0 in (flow.here, flow.there))
    assert out_of_first == pytest.approx(model_bytes * 2 * 2 / 3, rel=0.01)
    assert {flow.kind for flow in state.flows} == {"reduction"}

    piped = planned(2, stages=2)
    assert isinstance(piped.plan, Plan)
    (pipeline,) = piped.plan.pipelines
    flow, *guarding = view_state(piped, name_of(0), from_step=0).flows
    assert flow.kind == "pipeline"
    assert [(guard.kind, guard.here, guard.there) for guard in guarding] == [
        ("guard", 0, 1), ("guard", 1, 0),
    ]  # fmt: skip
    assert sum(guard.bytes_per_step for guard in guarding) == model_bytes
    assert flow.bytes_per_step == pipeline.microbatch_count * work.boundary_bytes
    assert flow.bytes_per_s and flow.use == pytest.approx(
        flow.bytes_per_step * 1e9 / flow.bytes_per_s / STEP_NS, abs=1e-4
    )


def test_shares_of_all_peers_add_up_to_the_step() -> None:
    view = planned(4, stages=2, spares=1)
    parts = [view_state(view, name_of(number), from_step=0).part for number in range(5)]
    assert sum(part.share for part in parts if part) == pytest.approx(1.0, abs=0.001)
    assert [part.share > 0 for part in parts if part] == [True] * 4 + [False]
    assert all(part.step_ns == STEP_NS for part in parts if part)
    assert parts[4] and parts[4].role.startswith("spare")


def test_a_spare_guards_what_others_hold_alone() -> None:
    view = planned(2, stages=2, spares=1)
    state = view_state(view, name_of(2), from_step=0)
    assert isinstance(view.plan, Plan) and state.part
    assert set(state.part.guards) == set(view.plan.layers_of(name_of(0)))
    assert [flow.here for flow in state.flows if flow.there == 2] == [0]


def test_without_a_plan_there_are_members_and_a_reason() -> None:
    shot = snapshot([Peer(memory_bytes=1 << 20)], workload())
    view = View(shot, compute_plan(shot))
    assert isinstance(view.plan, NoPlan)
    state = view_state(view, name_of(0), from_step=0)
    assert state.no_plan == view.plan.reason
    assert len(state.peers) == 1 and not state.pipelines and not state.flows
    assert state.part is None


def test_the_next_map_resembles_this_one() -> None:
    first = view_state(planned(6, stages=3), name_of(0), from_step=0)
    again = view_state(planned(6, stages=3), name_of(0), from_step=3, before=points_of(first))
    for one, other in itertools.zip_longest(first.peers, again.peers):
        assert abs(one.x - other.x) < 0.2 and abs(one.y - other.y) < 0.2
