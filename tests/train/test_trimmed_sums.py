"""A quarter of those who add to a sum cannot move it far."""

import pytest
import torch

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Segment
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.stage.replay.work import added
from p2p_dtfm.train.stage.segment_reduction import PoisonedPart, SegmentCut, SegmentReduction
from p2p_dtfm.train.updates.trimmed_sums import left_out, trimmed_over, trimmed_sum
from tests.train.holders import exchange
from tests.train.test_parity import TWO_BY_TWO, stage
from tests.train.test_recipes import changed

ELEMENTS = 4000


def parts_of(microbatches: tuple[int, ...]) -> list[torch.Tensor]:
    """Sums over as many microbatches each, whose gradients scatter around one."""
    truth = torch.linspace(-1.0, 1.0, ELEMENTS)
    return [count * (truth + 0.1 * torch.randn(ELEMENTS)) for count in microbatches]


@pytest.mark.parametrize("holders", [3, 4, 5, 8, 9, 64])
def test_a_quarter_of_liars_moves_no_value_beyond_what_honest_ones_sent(holders: int) -> None:
    torch.manual_seed(holders)
    microbatches = tuple(1 + number % 3 for number in range(holders))
    parts = parts_of(microbatches)
    liars = left_out(holders)
    assert 4 * liars >= holders > 2 * liars, "a quarter, and most are left"
    honest = torch.stack([p / n for p, n in zip(parts, microbatches, strict=True)][liars:])
    for lie in (-1e6, 1e6, -1.0):
        told = [lie * part for part in parts[:liars]] + parts[liars:]
        mean = trimmed_sum(told, microbatches) / sum(microbatches)
        edge = 1e-5
        assert (mean >= honest.amin(0) - edge).all() and (mean <= honest.amax(0) + edge).all()
    plain = added(parts) / sum(microbatches)
    near = trimmed_sum(parts, microbatches) / sum(microbatches)
    assert 0.0 < (near - plain).abs().mean() < 0.1, "the honest sum is near, and another one"


def test_of_three_it_is_the_median_and_of_two_the_sum() -> None:
    parts = [torch.tensor(values) for values in ([1.0, 8.0], [4.0, 2.0], [9.0, -90.0])]
    assert trimmed_sum(parts, (1, 2, 3)).tolist() == [6 * 2.0, 6 * 1.0]
    assert [left_out(count) for count in range(1, 10)] == [0, 0, 1, 1, 2, 2, 2, 2, 3]


def test_holders_come_to_the_same_bytes_and_whoever_computes_again_too(spec: RunSpec) -> None:
    torch.manual_seed(5)
    microbatches = (2, 1, 3, 1)
    parts = parts_of(microbatches)
    bounds = [(0, 1500), (1500, 1501), (1501, 3000), (3000, ELEMENTS)]
    sides = []
    for part in parts:
        cut = SegmentCut(1, bounds, [ELEMENTS], microbatches)
        side = SegmentReduction(spec, codec_of("fp32", spec.codecs), 0, cut, None)
        side.fill(1, part)
        sides.append(side)
    exchange(sides, len(bounds))
    assert len({side.reduced.numpy().tobytes() for side in sides}) == 1
    assert torch.equal(sides[0].reduced, added(parts, microbatches)), "in chunks or whole"


def test_what_is_not_finite_is_not_just_left_out(spec: RunSpec) -> None:
    cut = SegmentCut(1, [(0, 3)], [3], (1, 1, 1))
    side = SegmentReduction(spec, codec_of("fp32", spec.codecs), 0, cut, None)
    side.fill(1, torch.ones(3))
    poison = torch.tensor([1.0, float("nan"), 1.0])
    with pytest.raises(PoisonedPart) as found:
        side.add_parts(0, [None, torch.ones(3), poison])
    assert found.value.place == 2


def test_only_where_the_run_says_so_and_three_hold_a_layer(spec: RunSpec) -> None:
    trimmed = changed(spec, sync={"sums": "trimmed"})
    assert trimmed.digest() != spec.digest() and b"sums" not in spec.canonical_bytes()
    assert RunSpec.from_canonical_bytes(trimmed.canonical_bytes()) == trimmed
    three = Plan(
        tuple(Pipeline((stage(peer, 0, 5),), n, n + 1) for n, peer in enumerate("abc")), (), 0
    )
    assert trimmed_over(trimmed, three, three.segments()[0]) == (1, 2, 3)
    assert trimmed_over(spec, three, three.segments()[0]) == ()
    assert all(trimmed_over(trimmed, TWO_BY_TWO, each) == () for each in TWO_BY_TWO.segments())
    both = Plan((*three.pipelines, Pipeline((stage("a", 0, 5),), 6, 2)), (), 0)
    assert both.microbatches_of(Segment(0, 5, ("a", "b", "c"))) == (3, 2, 3), "it stands in"


@pytest.mark.parametrize(
    "sections",
    [
        {"sync": {"sums": "trimmed", "mode": "local", "inner_steps": 2}},
        {"sync": {"sums": "trimmed"}, "codecs": {"reduction": "sparse"}},
    ],
    ids=["local steps", "sparse"],
)
def test_it_is_refused_where_most_values_are_left_out(spec: RunSpec, sections) -> None:
    with pytest.raises(UserError, match="sends every value"):
        changed(spec, **sections)
