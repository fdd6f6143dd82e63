"""A view as the dashboard shows it: flows add up, and this peer's part is what the plan says."""

import itertools
from collections import Counter

import msgspec
import pytest

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Intent, Link
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.dashboard import view_facts
from p2p_dtfm.daemon.dashboard.view_facts import points_of, view_state
from p2p_dtfm.sim.paper.named_plans import grid_plan
from p2p_dtfm.web.state import MyPart
from tests.core.builders import run_spec
from tests.core.planning import LAN, Peer, name_of, snapshot, workload

STEP_NS = 2_000_000_000
SPEC = run_spec()


def planned(
    count: int, stages: int, spares: int = 0, spec: RunSpec = SPEC, link: Link = LAN
) -> View:
    """Pipelines of `stages` equal peers, with spares after them."""
    work = workload_of(spec)
    work = msgspec.structs.replace(work, microbatch_count=max(count, work.microbatch_count))
    shot = snapshot([Peer() for _ in range(count + spares)], work, link=link)
    names = tuple(map(name_of, range(count)))
    grid = grid_plan(names, shot.workload, stages)
    idle = tuple(map(name_of, range(count, count + spares)))
    plan = msgspec.structs.replace(grid, spares=idle, predicted_step_ns=STEP_NS)
    return View(shot, plan)


def test_every_member_has_its_place() -> None:
    view = planned(4, stages=2, spares=1)
    assert isinstance(view.plan, Plan)
    state = view_state(view, SPEC, name_of(2), from_step=7)
    assert state.me == 2 and state.from_step == 7 and state.number == view.id.number
    for peer in state.peers:
        place = view.plan.place_of(peer.peer_id)
        assert (peer.pipeline, peer.position) == (place or (None, None))
        assert range(peer.first_layer, peer.end_layer) == view.plan.layers_of(peer.peer_id)
    for facts, pipeline in zip(state.pipelines, view.plan.pipelines, strict=True):
        named = [state.peers[number].peer_id for number in facts.peers]
        assert named == [stage.peer_id for stage in pipeline.stages]


def test_who_stands_in_is_shown_in_both_pipelines() -> None:
    """Peers 0 and 1 are a pipeline, and 2 and 3. Then 1 has gone, and 3 has the work of both."""
    view = planned(4, stages=2)
    assert isinstance(view.plan, Plan)
    first, second = view.plan.pipelines
    stage = msgspec.structs.replace(first.stages[1], peer_id=name_of(3), stands_in=True)
    first = msgspec.structs.replace(first, stages=(first.stages[0], stage))
    plan = msgspec.structs.replace(view.plan, pipelines=(first, second))
    left = tuple(r for r in view.snapshot.records if r.peer_id != name_of(1))
    mended = View(msgspec.structs.replace(view.snapshot, records=left), plan)
    state = view_state(mended, SPEC, name_of(3), from_step=7)
    assert [pipeline.peers for pipeline in state.pipelines] == [(0, 2), (1, 2)]
    assert (state.peers[2].pipeline, state.peers[2].position) == (1, 1)
    assert state.part is not None and state.part.share == 0.5
    assert "stands in for a lost peer in pipeline 1" in state.part.role
    ways = {(flow.here, flow.there) for flow in state.flows if flow.kind == "pipeline"}
    assert ways == {(0, 2), (1, 2)}
    assert view_state(mended, SPEC, name_of(0), from_step=7).part is not None


def test_flows_are_activations_and_gradients() -> None:
    """The reduction of a segment among n holders moves 2 (n-1)/n of its bytes out of each
    holder."""
    view = planned(3, stages=1)
    state = view_state(view, SPEC, name_of(0), from_step=0)
    work = view.snapshot.workload
    model_bytes = 4 * sum(work.cost(layer).parameter_count for layer in range(work.layer_count))
    sent = {flow.there_bytes for flow in state.flows} | {flow.here_bytes for flow in state.flows}
    assert max(sent) - min(sent) <= 8, "equal peers sum equal parts"
    out_of_first = sum(flow.there_bytes for flow in state.flows if flow.here == 0)
    assert out_of_first == pytest.approx(model_bytes * 2 * 2 / 3, rel=0.01)
    assert {flow.kind for flow in state.flows} == {"reduction"}

    piped = planned(2, stages=2)
    assert isinstance(piped.plan, Plan)
    (pipeline,) = piped.plan.pipelines
    flow, *guarding = view_state(piped, SPEC, name_of(0), from_step=0).flows
    assert flow.kind == "pipeline"
    assert [(guard.kind, guard.here, guard.there) for guard in guarding] == [
        ("guard", 0, 1), ("guard", 1, 0),
    ]  # fmt: skip
    assert sum(guard.there_bytes for guard in guarding) == model_bytes
    assert flow.there_bytes == flow.here_bytes == pipeline.microbatch_count * work.boundary_bytes
    assert flow.bytes_per_s and flow.use == pytest.approx(
        flow.there_bytes * 1e9 / flow.bytes_per_s / STEP_NS, abs=1e-4
    )


def test_flows_count_bytes_as_their_codecs_send_them() -> None:
    """Eight bits on the boundary instead of 32, with a scale for each 128 values. One gradient in a
    hundred is sent, of which a part is kept."""
    slow = Link(round_trip_ns=200_000, bytes_per_s=100_000)
    plain = view_state(planned(4, stages=2, link=slow), SPEC, name_of(0), from_step=0)
    codecs = {"activations": ("int8",), "gradients": ("bf16",), "reduction": "sparse"}
    spec = run_spec(codecs=codecs)
    coded = view_state(planned(4, stages=2, spec=spec, link=slow), spec, name_of(0), from_step=0)
    pairs = list(zip(plain.flows, coded.flows, strict=True))
    assert {flow.kind for flow in coded.flows} == {"pipeline", "reduction"}
    for flow, encoded in pairs:
        assert (flow.here, flow.there, flow.kind) == (encoded.here, encoded.there, encoded.kind)
        ways = (encoded.there_bytes / flow.there_bytes, encoded.here_bytes / flow.here_bytes)
        if flow.kind == "pipeline":
            assert sorted(ways) == pytest.approx([0.26, 0.5], abs=0.001)
        else:
            work = workload_of(spec)
            assert ways == pytest.approx([work.gradient_bytes_per_kibi / 4096] * 2, rel=0.01)
            assert ways[0] < 0.05
    busiest = max(flow.use or 0 for flow in coded.flows if flow.kind == "pipeline")
    assert busiest == pytest.approx(
        max(f.use or 0 for f in plain.flows if f.kind == "pipeline") / 2, rel=0.01
    )


def test_shares_of_all_peers_add_up_to_the_step() -> None:
    view = planned(4, stages=2, spares=1)
    parts = [view_state(view, SPEC, name_of(number), from_step=0).part for number in range(5)]
    assert sum(part.share for part in parts if part) == pytest.approx(1.0, abs=0.001)
    assert [part.share > 0 for part in parts if part] == [True] * 4 + [False]
    assert all(part.step_ns == STEP_NS for part in parts if part)
    assert parts[4] and parts[4].role.startswith("spare")


def test_of_very_many_flows_between_others_there_are_those_of_pipelines_alone() -> None:
    """With 400 replicas there were 80,000 flows, ten megabytes at each view, and no page drew one
    of them."""
    few = view_state(planned(17, stages=1), SPEC, name_of(0), from_step=0)
    assert len(few.flows) == 17 * 16 // 2 and not few.are_flows_left_out
    many = view_state(planned(20, stages=1), SPEC, name_of(3), from_step=0)
    assert many.are_flows_left_out and len(many.flows) == 19
    assert all(3 in (flow.here, flow.there) for flow in many.flows)
    out = sum(flow.there_bytes if flow.here == 3 else flow.here_bytes for flow in many.flows)
    work = planned(20, stages=1).snapshot.workload
    model_bytes = 4 * sum(work.cost(layer).parameter_count for layer in range(work.layer_count))
    assert out == pytest.approx(model_bytes * 2 * 19 / 20, rel=0.01)
    piped = view_state(planned(40, stages=2), SPEC, name_of(0), from_step=0)
    kinds = Counter(flow.kind for flow in piped.flows)
    assert piped.are_flows_left_out and kinds == {"pipeline": 20, "reduction": 19}


def test_a_spare_guards_what_others_hold_alone() -> None:
    view = planned(2, stages=2, spares=1)
    state = view_state(view, SPEC, name_of(2), from_step=0)
    assert isinstance(view.plan, Plan) and state.part
    assert set(state.part.guards) == set(view.plan.layers_of(name_of(0)))
    assert [flow.here for flow in state.flows if flow.there == 2] == [0]


def test_a_spare_is_told_why_it_is_one() -> None:
    """The page said that a spare's memory is too small wherever no other plan was told."""
    view = planned(4, stages=2, spares=1)
    shot, me = view.snapshot, name_of(4)
    assert isinstance(view.plan, Plan)

    def part_of(snapshot: Snapshot) -> MyPart:
        part = view_state(View(snapshot, view.plan), SPEC, me, from_step=0).part
        assert part is not None and part.role.startswith(("spare", "no stage"))
        return part

    fits = part_of(shot)
    assert fits.other_step_ns and fits.why_spare.endswith("faster, too little to move layers for.")
    *others, last = shot.records
    strange = msgspec.structs.replace(last, links={})
    lonely = tuple(
        msgspec.structs.replace(it, links={k: v for k, v in it.links.items() if k != me})
        for it in others
    )
    unmeasured = msgspec.structs.replace(shot, records=(*lonely, strange), present=view.plan)
    part = part_of(unmeasured)
    assert part.why_spare == "Its links to those who train are not measured yet."
    small = msgspec.structs.replace(last.device, memory_bytes=2)
    tiny = msgspec.structs.replace(last, device=small)
    part = part_of(msgspec.structs.replace(shot, records=(*others, tiny)))
    assert part.other_step_ns is None
    assert part.why_spare.startswith("It offers 2 B for layers, and the least that it could")
    idle = msgspec.structs.replace(last, intent=Intent.SPARE)
    assert part_of(msgspec.structs.replace(shot, records=(*others, idle))).why_spare == (
        "It is spare."
    )


def test_what_others_would_do_without_a_member_is_not_worked_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody shows it, and with 400 members it took each of them seconds, at each view."""
    monkeypatch.setattr(view_facts, "explain_peer", None)
    part = view_state(planned(4, stages=2), SPEC, name_of(0), from_step=0).part
    assert part is not None and part.role.startswith("pipeline 1 of 2, stage 1 of 2: layers 0-")


def test_without_a_plan_there_are_members_and_a_reason() -> None:
    shot = snapshot([Peer(memory_bytes=1 << 20)], workload())
    view = View(shot, compute_plan(shot))
    assert isinstance(view.plan, NoPlan)
    state = view_state(view, SPEC, name_of(0), from_step=0)
    assert state.no_plan == view.plan.reason
    assert len(state.peers) == 1 and not state.pipelines and not state.flows
    assert state.part is None


def test_the_next_map_resembles_this_one() -> None:
    first = view_state(planned(6, stages=3), SPEC, name_of(0), from_step=0)
    again = view_state(planned(6, stages=3), SPEC, name_of(0), from_step=3, before=points_of(first))
    for one, other in itertools.zip_longest(first.peers, again.peers):
        assert abs(one.x - other.x) < 0.2 and abs(one.y - other.y) < 0.2
