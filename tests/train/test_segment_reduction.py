"""Reduction with codecs: equal bits on all holders, nothing lost, nothing counted twice."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import CodecSpec, RunSpec, SparseSpec
from p2p_dtfm.train.codecs import Codec, codec_of
from p2p_dtfm.train.stage.local_steps import even_ranges
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory
from p2p_dtfm.train.stage.segment_reduction import SegmentCut, SegmentReduction
from tests.train.holders import exchange, in_order

CODECS = CodecSpec(sparse=SparseSpec(one_in=4, keep_percent=25))
NAMES = ["fp32", "bf16", "int8", "sparse"]


def reduce(
    spec: RunSpec,
    name: str,
    step: int,
    values: list[Tensor],
    owed: list[Tensor | None],
    cuts: list[tuple[int, int]] | None = None,
) -> list[SegmentReduction]:
    """All holders of a segment in one process; chunk i belongs to holder i modulo the number of
    holders."""
    holders = len(values)
    bounds = cuts or even_ranges(values[0].numel(), 2 * holders)
    codec = codec_of(name, CODECS)
    sides = [side_of(spec, codec, step, bounds, v, o) for v, o in zip(values, owed, strict=True)]
    exchange(sides, len(bounds))
    return sides


def side_of(
    spec: RunSpec,
    codec: Codec,
    step: int,
    bounds: list[tuple[int, int]],
    values: Tensor,
    owed: Tensor | None,
) -> SegmentReduction:
    """One holder of a segment of one layer."""
    side = SegmentReduction(spec, codec, step, SegmentCut(1, bounds, [values.numel()]), owed)
    side.fill(1, values)
    return side


def drawn(holders: int, count: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator) for _ in range(holders)]


def test_the_sum_keeps_the_order_of_the_holders(spec: RunSpec) -> None:
    large, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    for values, total in (([large, small, small], 2.0**24), ([small, small, large], 2.0**24 + 2)):
        sides = reduce(spec, "fp32", 0, values, [None] * 3, [(0, 1)])
        assert {side.reduced.item() for side in sides} == {total}
    assert small.item() == 1.0 and large.item() == 2.0**24, "gradients must stay as they were"


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 3000), st.integers(0, 1 << 20))
def test_all_holders_end_with_the_same_bits(name: str, holders: int, count: int, seed: int) -> None:
    spec = _SPEC[0]
    values = drawn(holders, count, seed)
    sides = reduce(spec, name, 3, values, [None] * holders)
    first = bytes(sides[0].reduced.numpy())
    assert all(bytes(side.reduced.numpy()) == first for side in sides)
    if name == "fp32":
        assert torch.equal(sides[0].reduced, in_order(values))
        assert all(side.owed is None for side in sides)
        return
    owed = [side.owed for side in sides if side.owed is not None]
    assert len(owed) == holders
    arrived_or_owed = sides[0].reduced.double() + sum(o.double() for o in owed)
    wanted = sum(value.double() for value in values)
    assert float((arrived_or_owed - wanted).abs().max()) < 1e-5, "what has not arrived is owed"


@pytest.mark.parametrize("name", ["int8", "sparse"])
def test_what_is_owed_arrives_later_whoever_owns(spec: RunSpec, name: str) -> None:
    """Chunks change their owners on the way; the sums still add up to what was given."""
    count, holders, steps = 997, 3, 60
    given = drawn(holders, count, 1)
    owed: list[Tensor | None] = [None] * holders
    arrived = torch.zeros(count, dtype=torch.float64)
    for step in range(steps):
        cuts = even_ranges(count, holders if step < 25 else 2 * holders + 1)
        sides = reduce(spec, name, step, given, owed, cuts)
        arrived += sides[0].reduced.double()
        owed = [side.owed for side in sides]
    wanted = steps * sum(value.double() for value in given)
    missing = (arrived - wanted).abs() / (sum(value.abs() for value in given) + 1)
    assert float(missing.max()) < 40, "no element waits for ever"
    assert float((arrived - wanted).norm() / wanted.norm()) < (0.3 if name == "sparse" else 0.001)


def test_an_attempt_is_repeatable(spec: RunSpec) -> None:
    """What is owed is an input, and an attempt does not change it."""
    values = drawn(2, 500, 4)
    owed = [torch.randn(500), torch.randn(500)]
    kept = [each.clone() for each in owed]
    first, second = (reduce(spec, "sparse", 9, values, list(owed)) for _ in range(2))
    assert torch.equal(first[0].reduced, second[1].reduced)
    assert all(torch.equal(a, b) for a, b in zip(owed, kept, strict=True))
    other = reduce(spec, "sparse", 10, values, list(owed))
    assert not torch.equal(first[0].reduced, other[0].reduced), "another step, another choice"


def test_a_wrong_part_changes_nothing(spec: RunSpec) -> None:
    codec = codec_of("int8", CODECS)
    side = side_of(spec, codec, 0, [(0, 50), (50, 90)], torch.randn(90), None)
    before = side.reduced.clone()
    for call in (lambda: side.read_part(0, b"123"), lambda: side.take_sum(1, b"")):
        with pytest.raises(PeerFault, match="are due for"):
            call()
    assert torch.equal(side.reduced, before) and not side.owed.any()


def test_a_chunk_can_travel_when_its_layers_are_filled(spec: RunSpec) -> None:
    """A chunk may be of one layer or of several, and what a layer's gradient was stays as it is."""
    cut = SegmentCut(4, [(0, 5), (5, 12), (12, 20)], [10, 10])
    side = SegmentReduction(spec, codec_of("fp32", CODECS), 0, cut, None)
    assert [side.layers_of(chunk) for chunk in range(3)] == [[4], [4, 5], [5]]
    gradient = torch.arange(10.0)
    side.fill(5, gradient)
    assert bytes(side.part(2)) == gradient[2:].numpy().tobytes()
    side.take_sum(2, torch.ones(8).numpy().tobytes())
    side.fill(4, gradient)
    parts = [torch.ones(5), None, torch.full((5,), 2.0)]
    assert bytes(side.add_parts(0, parts)) == (torch.arange(5.0) + 3).numpy().tobytes()
    assert torch.equal(gradient, torch.arange(10.0))
    layers = side.reduced_layers()
    assert torch.equal(layers[5], torch.tensor([0.0, 1, *[1] * 8]))


def test_what_is_owed_goes_into_one_step_only() -> None:
    """A step was prepared by all. One of them saw that, and was cut off; the others began it anew,
    failed, and were then rolled forward to it as it was at first. What they had owed before it went
    into it, and into the next one once more, in place of what it had left out."""
    states = [SimpleNamespace(layer=1, parameter_count=2)]
    memory = ReplicaMemory()

    def attempt(view: str, step: int, owed: float) -> None:
        memory.keep_only([1])
        memory.begin(view)
        memory.propose_owed(step, states, torch.full((2,), owed))

    def owes() -> float | None:
        owed = memory.owed_of(states)
        return None if owed is None else float(owed[0])

    attempt("first", 3, 0.3)
    memory.commit(3, "first")
    attempt("first", 4, 0.4)
    memory.keep_only([1])
    memory.begin("second")
    assert owes() == pytest.approx(0.3), "the step begins anew"
    memory.commit(4, "first")
    assert owes() == pytest.approx(0.4)
    memory.commit(4, "first")
    assert owes() == pytest.approx(0.4), "it is told again, as others are rolled forward"
    attempt("third", 5, 0.5)
    attempt("fourth", 5, 0.6)
    memory.commit(5, "third")
    assert owes() is None, "what that attempt left out is not known any more"


_SPEC: list[RunSpec] = []


@pytest.fixture(autouse=True, scope="module")
def _spec(spec: RunSpec) -> None:
    _SPEC[:] = [spec]
