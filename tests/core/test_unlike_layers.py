"""Layers that a run lists one by one: what core knows of them, and how it cuts them."""

import itertools
import random

import msgspec
import pytest

from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.cost_model.tables.layer_tables import kinds_in
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.planner.recomputation import must_recompute
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.layers.timings import timing_of
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import (
    ACCELERATOR,
    Device,
    LayerTiming,
    Link,
    packed,
    unpacked,
)
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Workload, workload_of
from tests.core.builders import record, run_spec
from tests.core.planning import Peer, snapshot

MODEL = {"width": 8, "heads": 1, "context": 16, "vocabulary": 256}


def listed(sizes: list[dict[str, object]], **changes: object) -> RunSpec:
    layers = [{"kind": f"kind-{n}", "sizes": each} for n, each in enumerate(sizes)]
    model = MODEL | {"layers": len(sizes) - 2}
    return run_spec(model=model, layers=layers, **changes)


def sizes_of(
    boundary: tuple[int, ...], parameters: int = 100, flops: int = 1000
) -> dict[str, object]:
    return {
        "boundary": boundary,
        "parameters": parameters,
        "saved_values": 64,
        "forward_flops": flops,
    }


THREE = [sizes_of((16, 8)), sizes_of((4, 2, 2), 7, 500), sizes_of((10,), 9, 100)]


def test_a_workload_of_listed_layers_has_each_cost_and_each_boundary() -> None:
    work = workload_of(listed(THREE))
    assert [work.cost(layer).parameter_count for layer in range(3)] == [100, 7, 9]
    assert work.unlike is not None
    assert work.unlike.boundary_bytes == (2 * 16 * 8 * 4, 2 * 16 * 4)
    assert work.boundary_bytes == 2 * 16 * 8 * 4
    assert work.cost(1).forward_flops == 2 * 500
    assert listed(THREE).boundary_shape(2) == (2, 4, 2, 2)


def test_a_gpt_says_nothing_of_listed_layers() -> None:
    assert b"unlike" not in encode(workload_of(run_spec()))
    assert "layers" not in decode(
        run_spec().canonical_bytes(), dict[str, object], limit_bytes=1 << 16
    )
    assert b"listed" not in encode(record("a").device)


def test_a_listed_run_keeps_its_name_over_the_network() -> None:
    spec = listed(THREE)
    again = RunSpec.from_canonical_bytes(spec.canonical_bytes())
    assert again == spec
    assert again.digest() == spec.digest()


def test_options_are_what_a_table_says_besides() -> None:
    spec = run_spec(
        model=MODEL | {"layers": 1},
        layers=[{"kind": "a"}, {"kind": "b", "width": 4, "fast": True}, {"kind": "c", "how": "x"}],
    )
    assert spec.layers[1].options == {"width": 4, "fast": True}
    with pytest.raises(PeerFault, match="without their sizes"):
        RunSpec.from_canonical_bytes(spec.canonical_bytes())
    with pytest.raises(UserError, match="do not state their sizes"):
        workload_of(spec)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layers": []}, "lists 3, and model.layers"),
        ({"lora": {"rank": 2}, "model": {"initial": "ab" * 32}}, "lora"),
        ({"model": {"tied_head": True}}, "tied_head"),
        ({"optimizer": {"kind": "muon"}}, "muon"),
        ({"audit": {"rate": 0.5}}, "audit"),
        ({"codecs": {"activations": "auto"}}, "several codecs"),
        ({"data": {"packing": "documents"}}, "documents"),
    ],
)
def test_what_only_a_gpt_can_do_is_refused(change: dict[str, dict[str, object]], why: str) -> None:
    values = listed(THREE).model_dump(mode="json")
    for section, keys in change.items():
        if section == "layers":
            values["model"]["layers"] = 4
        else:
            values[section] = values[section] | keys
    with pytest.raises(UserError, match=why):
        parse_run_spec(values, "here.toml")


@pytest.mark.parametrize(
    "hostile",
    [
        {"boundary": (1 << 30,)},
        {"boundary": (1 << 20, 1 << 20)},
        {"boundary": (1, 1, 1, 1, 1)},
        {"boundary": ()},
        {"boundary": (-1,)},
        {"parameters": 1 << 62},
        {"parameters": 0},
        {"saved_values": -5},
        {"forward_flops": 1 << 63},
    ],
)
def test_hostile_sizes_are_no_run(hostile: dict[str, object]) -> None:
    values = listed(THREE).model_dump(mode="json")
    values["layers"][1]["sizes"] |= hostile
    with pytest.raises(PeerFault):
        RunSpec.from_canonical_bytes(encode(values))


@pytest.mark.parametrize(
    "layer",
    [
        {"kind": "../../etc"},
        {"kind": "A" * 100},
        {"kind": "a", "options": {str(n): n for n in range(100)}},
        {"kind": "a", "options": {"x": 1 << 50}},
        {"kind": "a", "options": {"x": "y" * 1000}},
        {"kind": "a", "options": {"x": [1, 2]}},
    ],
)
def test_hostile_tables_are_no_run(layer: dict[str, object]) -> None:
    values = listed(THREE).model_dump(mode="json")
    values["layers"][1] = layer | {"sizes": THREE[1]}
    with pytest.raises(PeerFault):
        RunSpec.from_canonical_bytes(encode(values))


def test_a_record_times_each_distinct_layer() -> None:
    work = workload_of(listed([*THREE[:2], THREE[1] | {"parameters": 8}, THREE[2]]))
    each = tuple(LayerTiming(n + 1, n + 2) for n in range(4))
    plain = record("a")
    timed = msgspec.structs.replace(
        plain, device=msgspec.structs.replace(plain.device, listed=each)
    )
    assert unpacked("a", packed(timed)) == timed
    assert [timing_of(timed.device, work, layer) for layer in range(4)] == list(each)
    assert timing_of(plain.device, work, 1) == plain.device.block
    odd = msgspec.structs.replace(packed(timed), layers_ns=(1,) * 7)
    with pytest.raises(PeerFault, match="no backward"):
        unpacked("a", odd)


def drawn(chance: random.Random) -> Snapshot:
    """A swarm of up to three peers with a run of up to twelve unlike layers."""
    layers = chance.randint(3, 12)
    sizes = [
        sizes_of((chance.choice((1, 8, 64, 512)), 8), chance.randint(10, 5000))
        for _ in range(layers)
    ]
    work = workload_of(listed(sizes))
    peers = chance.randint(2, 3)
    rates = {
        frozenset(pair): chance.choice((200_000, 2_000_000, 50_000_000))
        for pair in itertools.combinations(range(peers), 2)
    }

    links = {
        (a, b): Link(chance.choice((1, 20)) * 500_000, rates[frozenset((a, b))])
        for a, b in itertools.permutations(range(peers), 2)
    }
    shot = snapshot([Peer() for _ in range(peers)], work, links)
    return msgspec.structs.replace(
        shot,
        records=tuple(
            msgspec.structs.replace(each, device=_timed(each.device, work, chance))
            for each in shot.records
        ),
    )


def _timed(device: Device, work: Workload, chance: random.Random) -> Device:
    assert work.unlike is not None
    speed = chance.choice((1, 1, 3))
    each = [10 ** chance.randint(5, 7) // speed for _ in work.unlike.costs]
    return msgspec.structs.replace(
        device, listed=tuple(LayerTiming(forward_ns, 2 * forward_ns) for forward_ns in each)
    )


@pytest.mark.parametrize("seed", range(12))
def test_no_contiguous_cut_is_faster_than_the_plan(seed: int) -> None:
    """The simulator plays, message by message, all orders of all peers, or of some of them."""
    shot = drawn(random.Random(seed))
    plan = compute_plan(shot)
    assert isinstance(plan, Plan)
    problem = problem_of(shot)
    model = StepModel(problem)
    layers, count = problem.layer_count, problem.step.microbatch_count
    best_ns = 1 << 62
    for depth in range(1, min(problem.peer_count, layers) + 1):
        for peers in itertools.permutations(range(problem.peer_count), depth):
            for inner in itertools.combinations(range(1, layers), depth - 1):
                pipeline = model.pipelines_in(1).time_fixed(peers, (0, *inner, layers))
                assert pipeline is not None
                timed = model.simulated(model.dealt((peers,), [pipeline], (count,)))
                best_ns = min(best_ns, timed.step_ns)
    assert plan.predicted_step_ns <= best_ns


def test_a_cut_avoids_the_wide_boundary() -> None:
    """The layers take equal time, but one of them passes on a hundred times as much as the
    others."""
    sizes = [sizes_of((1, 8))] * 2 + [sizes_of((100, 8))] + [sizes_of((1, 8))] * 3
    work = workload_of(listed([size | {"parameters": n + 1} for n, size in enumerate(sizes)]))
    assert work.unlike is not None
    each = (LayerTiming(1_000_000, 2_000_000),) * 6
    shot = snapshot([Peer(), Peer()], work, link=Link(100_000, 300_000))
    shot = msgspec.structs.replace(
        shot,
        records=tuple(
            msgspec.structs.replace(one, device=msgspec.structs.replace(one.device, listed=each))
            for one in shot.records
        ),
    )
    plan = compute_plan(shot)
    assert isinstance(plan, Plan)
    cuts = {stage.first_layer for pipeline in plan.pipelines for stage in pipeline.stages}
    assert 3 not in cuts
    assert len(plan.pipelines) > 1 or len(plan.pipelines[0].stages) == 2


def test_time_is_that_of_the_layers_themselves() -> None:
    shot = drawn(random.Random(3))
    problem = problem_of(shot)
    times, device = problem.devices.layer_ns[0], shot.records[0].device
    kinds = kinds_in(1, 3, problem.layer_count)
    wanted = [timing_of(device, shot.workload, layer).forward_ns for layer in (1, 2)]
    assert times.forward_ns(kinds) == sum(wanted)
    here = [shot.workload.cost(layer) for layer in (1, 2)]
    assert problem.layers.state_bytes(1, 3) == sum(cost.state_bytes for cost in here)


@pytest.mark.parametrize("recompute", ["always", "auto", "never"])
def test_stages_that_recompute_hold_more_layers(recompute: str) -> None:
    sizes = [sizes_of((64, 64)) | {"saved_values": 1 << 20} for _ in range(6)]
    work = workload_of(listed(sizes, compute={"recompute": recompute}))
    room = 3 * work.cost(1).saved_bytes  # the bytes of one microbatch in three layers
    shot = snapshot([Peer(memory_bytes=room + (1 << 20))] * 2, work)
    plan = compute_plan(shot)
    assert isinstance(plan, Plan)
    shapes = [[len(stage.layers) for stage in pipeline.stages] for pipeline in plan.pipelines]
    recomputes = recompute != "never"
    assert shapes == ([[6], [6]] if recomputes else [[3, 3]])
    holders = plan.stage_holders()
    assert all(must_recompute(shot, plan, peer_id) is recomputes for peer_id in holders)


def test_memory_that_no_peer_has_is_said_by_layer() -> None:
    sizes = [sizes_of((1, 8)), sizes_of((1, 8), 1 << 28), sizes_of((1, 8))]
    work = workload_of(listed(sizes))
    found = compute_plan(snapshot([Peer(memory_bytes=1 << 30)] * 6, work))
    assert isinstance(found, NoPlan)
    assert "layer 1 needs 5.01 GiB on one peer" in found.reason


def test_a_processor_more_does_not_stop_cards_that_hold_all_layers() -> None:
    """Of two peers that offer as much, a card holds more. Nobody takes its place among those that
    are tried in every order."""
    parameters = (118, 341, 82, 180, 110, 303, 280, 291)
    work = workload_of(listed([sizes_of((4,), each) for each in parameters]))
    cards = [2400, 5968, 5216, 2272, 5360, 10160]
    for rooms, kinds in ((cards, [ACCELERATOR] * 6), ([*cards, 2273], [ACCELERATOR] * 6 + ["cpu"])):
        made = snapshot([Peer(memory_bytes=room) for room in rooms], work)
        records = tuple(
            msgspec.structs.replace(it, device=msgspec.structs.replace(it.device, kind=kind))
            for it, kind in zip(made.records, kinds, strict=True)
        )
        plan = compute_plan(msgspec.structs.replace(made, records=records))
        assert isinstance(plan, Plan), plan.reason
