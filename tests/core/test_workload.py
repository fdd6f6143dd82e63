"""The workload's integers against counts made by hand."""

import msgspec
import pytest

from p2p_dtfm.core.cost_model.tables.layer_tables import layer_sizes
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.workload import LayerRole, workload_of
from tests.core.builders import run_spec


def test_parameters_of_gpt2_small_add_up_to_the_published_count() -> None:
    spec = run_spec(
        model={"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocabulary": 50257}
    )
    work = workload_of(spec)
    total = sum(work.cost(layer).parameter_count for layer in range(work.layer_count))
    # 124,439,808 with the head tied to the embedding (Radford et al. 2019); ours is not tied
    assert total - 50257 * 768 == 124_439_808


def test_layers_are_embedding_blocks_head() -> None:
    work = workload_of(run_spec())
    kinds = [work.kind(layer) for layer in range(work.layer_count)]
    assert kinds == [LayerRole.EMBEDDING, *[LayerRole.BLOCK] * 4, LayerRole.HEAD]
    assert work.cost(0) is work.embedding and work.cost(5) is work.head


@pytest.mark.parametrize("layer", [-1, 6])
def test_there_are_no_other_layers(layer: int) -> None:
    with pytest.raises(AssertionError):
        workload_of(run_spec()).kind(layer)


def test_counts_follow_the_batch() -> None:
    work = workload_of(run_spec())
    assert work.microbatch_count == 4
    assert work.evaluation_microbatch_count == 2
    assert work.boundary_bytes == 2 * 32 * 32 * 4
    assert work.block.state_bytes == 16 * work.block.parameter_count


def test_operations_of_a_block_are_those_of_its_matrices_and_attention() -> None:
    work = workload_of(run_spec())
    tokens, width, context = 2 * 32, 32, 32
    matrices = 2 * tokens * (4 * width * width + 8 * width * width)
    attention = 2 * (2 * tokens * context * width)
    assert work.block.forward_flops == matrices + attention


def test_all_costs_are_positive_integers() -> None:
    work = workload_of(run_spec())
    for cost in (work.embedding, work.block, work.head):
        for name in ("parameter_count", "state_bytes", "saved_bytes", "forward_flops"):
            value = getattr(cost, name)
            assert type(value) is int and value > 0, name


def test_the_planner_counts_the_smallest_codec_that_is_allowed() -> None:
    whole = workload_of(run_spec())
    coded = msgspec.structs.replace(
        whole, boundary_bytes_per_kibi=1065, gradient_bytes_per_kibi=2048
    )
    assert whole.boundary_wire_bytes == whole.boundary_bytes
    assert whole.gradient_wire_bytes(whole.block) == 4 * whole.block.parameter_count
    assert 3.8 < whole.boundary_bytes / coded.boundary_wire_bytes < 3.9
    assert coded.gradient_wire_bytes(coded.block) == 2 * coded.block.parameter_count


def test_a_run_with_fp32_alone_has_the_same_bytes_as_ever() -> None:
    assert b"per_kibi" not in encode(workload_of(run_spec()))


def test_what_a_replica_keeps_to_itself_counts_as_state() -> None:
    local = {"mode": "local", "inner_steps": 2}
    for changes, copies in (
        ({"codecs": {"reduction": "int8"}}, 6),
        ({"sync": local}, 9),
        ({"sync": local, "codecs": {"reduction": "sparse"}}, 11),
        ({"sync": local, "codecs": {"reduction": "sign"}}, 11),
    ):
        work = workload_of(run_spec(**changes))
        assert work.block.state_bytes == 4 * copies * work.block.parameter_count


def test_of_a_state_parameters_and_moments_are_fetched_and_gradients_follow() -> None:
    """What a replica keeps to itself never moves, and what is frozen is fetched once."""
    local = {"sync": {"mode": "local", "inner_steps": 2}}
    lossy = {"codecs": {"reduction": "sparse"}}
    model = {**run_spec().model.model_dump(), "initial": "ab" * 32}
    adapters = {"lora": {"rank": 2}, "model": model}
    frozen = layer_sizes(workload_of(run_spec()))
    for changes in ({}, local, lossy, {**local, **lossy}, adapters):
        work = workload_of(run_spec(**changes))
        sizes = layer_sizes(work)
        for layer in range(work.layer_count):
            found, trained = sizes.of(layer), work.cost(layer).parameter_count
            file_bytes = 4 * frozen.of(layer).gradient_elements if "lora" in changes else 0
            assert found.fetched_bytes == 12 * trained + file_bytes
            assert found.followed_bytes == 4 * trained


def test_muon_takes_time_and_signs_few_bytes() -> None:
    muon, local = {"peak_learning_rate": 1e-3, "kind": "muon"}, {"mode": "local", "inner_steps": 2}
    assert b"update" not in encode(workload_of(run_spec())), "what plans are named by stays"
    in_step = workload_of(run_spec(optimizer=muon))
    # four of 32 x 32, two of 32 x 128: 2 (2 s^2 l + s^3) operations, 5 iterations, 3 products
    once = 4 * 2 * 3 * 32**3 + 2 * 2 * (2 * 32**2 * 128 + 32**3)
    share = 2 * 5 * once / in_step.block.forward_flops
    assert in_step.block_update_ppm == pytest.approx(1e6 * share, abs=1)
    alone = workload_of(run_spec(optimizer=muon, sync=local, codecs={"reduction": "sign"}))
    assert alone.block_update_ppm == in_step.block_update_ppm // 2
    assert alone.gradient_wire_bytes(alone.block) / (4 * alone.block.parameter_count) < 1 / 31
