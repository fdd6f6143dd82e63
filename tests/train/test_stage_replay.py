"""A stage's work is computed again from what came into it: the same gradients, loss and frames."""

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.planner.wire_plan import Chunks
from p2p_dtfm.train.codecs import Turn, boundary_turn, codec_of
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.work import (
    ACTIVATION,
    GRADIENT,
    Frame,
    GivenWork,
    Replay,
    Replayed,
    ReplayedEdge,
    SegmentParts,
    bytes_of,
    chunk_digest,
)
from p2p_dtfm.train.stage.stage_runner import StageRunner
from tests.core.builders import run_spec

SPEC = run_spec()
MICROBATCHES = (3, 1, 2)
STEP = 7
SHAPE = (SPEC.batch.microbatch, SPEC.model.context)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, SPEC.model.vocabulary, (2, *SHAPE), generator=generator)
    return tokens[0], tokens[1]


def boundary(seed: int) -> Tensor:
    return torch.randn((*SHAPE, SPEC.model.width), generator=torch.Generator().manual_seed(seed))


def frame(codec: str, values: Tensor, turn: Turn) -> Frame:
    payload = codec_of(codec, SPEC.codecs).encode(values, turn)
    return Frame(codec, bytes(memoryview(payload).cast("B")))


def turns(layers: tuple[int, ...], number: int) -> tuple[Turn, Turn, Turn, Turn]:
    """The turns of what comes in at the front and leaves at the back, and of their gradients."""
    first, end = layers[0], layers[-1] + 1
    before, after = (
        [boundary_turn(SPEC, STEP, layer, number, back=back) for back in (False, True)]
        for layer in (first, end)
    )
    return before[0], after[0], before[1], after[1]


def edge(number: int, codec: str = "fp32", layers: tuple[int, ...] = (0,)) -> ReplayedEdge:
    there, _, _, back = turns(layers, number)
    came = frame(codec, boundary(number), there)
    return ReplayedEdge(came, frame(codec, boundary(100 + number), back), codec, codec)


def replay(states: Mapping[int, LayerState], numbers: Sequence[int], given: GivenWork) -> Replayed:
    again = Replay(SPEC, states, given)
    for number in numbers:
        again.train(number)
        assert torch.get_num_threads() == 1, "other jobs come between"
    return again.replayed()


def work(layers: tuple[int, ...], codec: str, recompute: bool):
    """The work as a stage-holder does it: forwards ahead of the backwards, split where it can."""
    states = {layer: LayerState.genesis(SPEC, layer) for layer in layers}
    runner = StageRunner(SPEC, states, recompute)
    runner.zero_gradients()
    sent, losses = {}, {}
    for number in MICROBATCHES:
        near, (tokens, targets) = edge(number, codec, layers), batch(number)
        there, sent_there, _, _ = turns(layers, number)
        entry = tokens if runner.has_embedding else near.decoded(SPEC, near.activation, there)
        result = runner.forward(number, entry, targets if runner.has_head else None)
        if runner.has_head:
            losses[number] = result
        else:
            sent[ACTIVATION, number] = near.digest(SPEC, codec, result, sent_there)
    for number in MICROBATCHES:
        near, (_, _, sent_back, back_there) = edge(number, codec, layers), turns(layers, number)
        gradient = None if runner.has_head else near.decoded(SPEC, near.gradient, back_there)
        backward = runner.input_backward if runner.splits else runner.backward
        back = backward(number, gradient)
        if not runner.has_embedding:
            sent[GRADIENT, number] = near.digest(SPEC, codec, back, sent_back)
    for layer in reversed(layers):
        for number in MICROBATCHES if runner.splits else ():
            runner.weight_backward_layer(number, layer)
    return states, sent, sum(losses.values(), 0.0)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "rotated4", "subspace"])
@pytest.mark.parametrize("layers", [(0, 1, 2), (2, 3), (3, 4, 5)])
def test_a_stage_again(
    layers: tuple[int, ...], codec: str, recompute: bool, count: int, threads: None
) -> None:
    torch.set_num_threads(count)
    states, sent, loss_sum = work(layers, codec, recompute)
    torch.set_num_threads(1)
    fresh = {layer: LayerState.genesis(SPEC, layer) for layer in layers}
    again, keeps = (
        replay(
            fresh,
            MICROBATCHES,
            GivenWork(batch, count, lambda n: edge(n, codec, layers), saves_memory, step=STEP),
        )
        for saves_memory in (True, False)
    )
    for each in (again, keeps):
        assert each.sent == sent and each.loss_sum == loss_sum
        for layer, state in states.items():
            mine = bytes_of(state.gradient_vector().clone())
            assert chunk_digest(mine) == chunk_digest(bytes_of(each.gradients[layer]))


def test_a_loss_that_counts_more_is_weighed_again() -> None:
    """In conversations only the answers count, and each microbatch counts as many tokens as it
    has."""
    states = {layer: LayerState.genesis(SPEC, layer) for layer in (3, 4, 5)}
    plain = replay(states, (1,), GivenWork(batch, 1, edge))
    double = replay(states, (1,), GivenWork(batch, 1, edge, weight=lambda number: 2.0))
    assert double.loss_sum == 2 * plain.loss_sum
    assert torch.equal(double.gradients[5], 2 * plain.gradients[5])


def test_chunks_that_cross_layers_have_the_digests_of_their_bytes() -> None:
    gradients = [torch.randn(5), torch.randn(7), torch.randn(3)]
    parts = SegmentParts(gradients, Chunks(((0, 4), (4, 13), (13, 15)), ("a", "b", "a")))
    flat = bytes_of(torch.cat(gradients))
    ends = ((0, 16), (16, 52), (52, 60))
    assert parts.digests() == tuple(chunk_digest(flat[start:end]) for start, end in ends)
    assert [parts.payload(chunk) for chunk in range(3)] == [flat[start:end] for start, end in ends]


def test_another_input_comes_to_another_work() -> None:
    states = {layer: LayerState.genesis(SPEC, layer) for layer in (2, 3)}
    one = replay(states, MICROBATCHES, GivenWork(batch, 1, edge))
    bent = boundary(1)
    bent[0, 0, 0] += 1e-3
    lied = edge(1)._replace(activation=frame("fp32", bent, Turn()))
    unlike_one = GivenWork(batch, 1, lambda n: lied if n == 1 else edge(n))
    other = replay(states, MICROBATCHES, unlike_one)
    unlike = {key for key in one.sent if one.sent[key] != other.sent[key]}
    assert unlike == {(ACTIVATION, 1), (GRADIENT, 1)}
    assert not torch.equal(one.gradients[2], other.gradients[2])
