"""How tensors travel: bandwidth chooses owners, codecs must keep up, and both ends choose alike."""

from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.planner.wire_plan import (
    CHUNK_ELEMENTS,
    LEAST_CHUNK_ELEMENTS,
    BoundaryCodecs,
    cut_into_chunks,
    wire_plan,
)
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.run_spec import CodecSpec
from p2p_dtfm.core.protocol.workload import workload_of
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot

MODEL = {"layers": 4, "heads": 2, "context": 64, "vocabulary": 256}
A, B, C = (name_of(number) for number in range(3))


def alone(peer_id: str, first: int, count: int) -> Pipeline:
    return Pipeline((Stage(peer_id, 0, 6, 1),), first, count)


@given(st.integers(0, 5000), st.lists(st.integers(1, 1 << 50), min_size=1, max_size=6))
def test_chunks_cover_everything_by_weight(length: int, weights: list[int]) -> None:
    holders = tuple(name_of(number) for number in range(len(weights)))
    chunks = cut_into_chunks(length, holders, weights, chunk_elements=100)
    ends = [0]
    owned = dict.fromkeys(holders, 0)
    for (start, end), owner in zip(chunks.bounds, chunks.owners, strict=True):
        assert start == ends[-1] and 0 < end - start <= 100
        ends.append(end)
        owned[owner] += end - start
    assert ends[-1] == length
    for holder, weight in zip(holders, weights, strict=True):
        assert abs(owned[holder] - length * weight / sum(weights)) <= 1


def test_who_has_a_slow_uplink_owns_little_wherever_its_pipeline_stands() -> None:
    spec = run_spec()
    slow = Peer(uplink_bytes_per_s=1_000_000)
    records = snapshot([Peer(), slow, Peer()], workload_of(spec))
    for order in ((A, B, C), (B, C, A)):
        plan = Plan(tuple(alone(p, n, 1) for n, p in enumerate(order)), (), 0)
        wire = wire_plan(spec, plan, records)
        assert set(wire.chunks) == {0} and not wire.boundaries
        owned = dict.fromkeys(order, 0)
        for (start, end), owner in zip(*wire.chunks[0], strict=True):
            owned[owner] += end - start
        assert owned[B] < sum(owned.values()) // 50
        assert abs(owned[A] - owned[C]) <= 1


def test_a_boundary_takes_the_first_codec_that_keeps_up() -> None:
    """A boundary of [2, 32, 32] has 8 KiB; the busiest stage takes 3 * 3 ms for a microbatch."""
    allowed = CodecSpec(activations=("fp32", "bf16", "int8"), gradients=("fp32", "fp16"))
    spec = run_spec(codecs=allowed)
    plan = Plan((Pipeline((Stage(A, 0, 3, 1), Stage(B, 3, 6, 1)), 0, 4),), (), 0)
    expected = {
        100_000_000: BoundaryCodecs("fp32", "fp32"),
        700_000: BoundaryCodecs("bf16", "fp16"),
        300_000: BoundaryCodecs("int8", "fp16"),
        1_000: BoundaryCodecs("int8", "fp16"),
    }
    for bytes_per_s, codecs in expected.items():
        link = Link(1_000_000, bytes_per_s)
        records = snapshot([Peer(), Peer()], workload_of(spec), link=link)
        assert wire_plan(spec, plan, records).boundaries == {(A, B): codecs}
    assert wire_plan(spec, plan, None).boundaries == {(A, B): BoundaryCodecs("fp32", "fp32")}


def test_a_stage_in_the_middle_sends_two_tensors_over_one_uplink() -> None:
    """Each tensor alone would keep up in fp32; both together only do in fewer bytes, which the
    planner counts as well."""
    allowed = CodecSpec(activations=("fp32", "bf16"), gradients=("fp32", "fp16"))
    spec = run_spec(codecs=allowed)
    names = (A, B, C)
    stages = tuple(Stage(name, 2 * at, 2 * at + 2, 1) for at, name in enumerate(names))
    plan = Plan((Pipeline(stages, 0, 4),), (), 0)
    peers = [Peer(), Peer(uplink_bytes_per_s=1_500_000), Peer()]
    wire = wire_plan(spec, plan, snapshot(peers, workload_of(spec)))
    assert wire.boundaries[A, B] == BoundaryCodecs("fp32", "fp16"), "its gradient leaves B"
    assert wire.boundaries[B, C] == BoundaryCodecs("bf16", "fp32"), "its activation leaves B"


def chunk_elements(bytes_per_s: int, width: int) -> list[int]:
    """The sizes of the chunks of one segment that two peers hold, over links of such a rate."""
    spec = run_spec(model={**MODEL, "width": width})
    peers = [Peer(uplink_bytes_per_s=bytes_per_s, downlink_bytes_per_s=bytes_per_s)] * 2
    plan = Plan((alone(A, 0, 1), alone(B, 1, 1)), (), 0)
    wire = wire_plan(spec, plan, snapshot(peers, workload_of(spec)))
    assert wire.chunks[0].bounds[-1][1] == sum(
        workload_of(spec).cost(layer).parameter_count for layer in range(6)
    )
    return [end - start for start, end in wire.chunks[0].bounds]


def test_over_a_slow_link_a_chunk_takes_no_longer_than_a_hundredth_of_a_second() -> None:
    """Otherwise the next chunk's part waits for the whole of this one, and this one's sum waits as
    well."""
    slow, slower, fast = (chunk_elements(rate, 128) for rate in (20_000_000, 1_000_000, 1 << 40))
    assert max(slow) <= 20_000_000 // 100 // 4 < max(fast)
    assert max(slower) <= LEAST_CHUNK_ELEMENTS, "and is worth a frame"


def test_what_travels_for_long_is_cut_into_few_chunks() -> None:
    """A large segment goes over a slow link. Cut finely, what members claim would be mostly
    digests."""
    chunks = chunk_elements(1_000_000, 768)
    assert 32 <= len(chunks) <= 48 and LEAST_CHUNK_ELEMENTS < max(chunks) <= CHUNK_ELEMENTS
