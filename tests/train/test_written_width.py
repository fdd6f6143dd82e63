"""Blocks that write few channels: what travels is narrow, and nothing else is lost."""

import math

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.model_spec import with_preset
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, workload_of
from p2p_dtfm.train.model.gpt import build_plain_layer, layer_count, layer_entries
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.model_copy import copied_model
from p2p_dtfm.train.model.narrow.fixed_code import STRENGTH, fixed_code, place_code, token_code
from p2p_dtfm.train.model.narrow.whole_layers import whole_spec
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.stage_runner import StageRunner
from tests.core.builders import run_spec
from tests.e2e.test_parity import synthetic_batch

MODEL = {"layers": 4, "width": 32, "heads": 2, "context": 32, "vocabulary": 256}
LLAMA = {"preset": "llama", **MODEL, "vocabulary": 1000}


def narrow(model: dict[str, object] = MODEL, written: int = 12, **changes: object) -> RunSpec:
    return run_spec(model=with_preset({**model, "written_width": written}), **changes)


def stages_of(spec: RunSpec, cut: int, recompute: bool = False) -> list[StageRunner]:
    states = {n: LayerState.genesis(spec, n) for n in range(layer_count(spec))}
    both = range(cut), range(cut, len(states))
    return [StageRunner(spec, {n: states[n] for n in layers}, recompute) for layers in both]


def step(spec: RunSpec, stages: list[StageRunner], crossed: list[Tensor]) -> float:
    """A step's forwards and backwards. What crosses the boundary goes into `crossed`."""
    first, last = stages
    loss_sum = 0.0
    for number in range(spec.microbatches_per_step):
        tokens, targets = synthetic_batch(spec)(0, number)
        activation = first.forward(number, tokens)
        assert isinstance(activation, Tensor)
        loss = last.forward(number, activation, targets, tokens)
        assert isinstance(loss, float)
        back = last.backward(number)
        assert back is not None
        first.backward(number, back)
        crossed += [activation, back]
        loss_sum += loss
    return loss_sum / spec.tokens_per_step


def gradients(stages: list[StageRunner]) -> list[Tensor]:
    return [s.gradient_vector() for stage in stages for s in stage.layer_states.values()]


@pytest.mark.parametrize("cut", [1, 3, 5])
@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["gpt2", "llama"])
def test_stages_compute_what_the_plain_loop_does_wherever_they_are_cut(
    cut: int, model: dict[str, object]
) -> None:
    spec = narrow(model)
    stages, crossed = stages_of(spec, cut), []
    loss = step(spec, stages, crossed)
    assert {tuple(each.shape) for each in crossed} == {(2, 32, 12)} == {spec.boundary_shape(cut)}
    plain = ReferenceRun(spec, synthetic_batch(spec))
    assert loss == pytest.approx(next(plain.losses(1)), abs=1e-6)
    ours = math.sqrt(sum(float(g.square().sum()) for g in gradients(stages)))
    assert ours > 0.0


def test_recomputing_and_cutting_elsewhere_give_the_same_bits() -> None:
    spec = narrow()
    found = []
    for cut, recompute in ((3, False), (3, True), (2, False)):
        stages = stages_of(spec, cut, recompute)
        step(spec, stages, [])
        found.append(torch.cat(gradients(stages)).numpy().tobytes())
    assert len(set(found)) == 1


def test_what_lies_before_a_boundary_depends_on_the_written_channels_alone() -> None:
    """So only their gradient must travel back. A derivative by differences shows it."""
    spec = narrow()
    stages = stages_of(spec, 3)
    tokens, targets = synthetic_batch(spec)(0, 0)
    activation = stages[0].evaluate(tokens)
    assert isinstance(activation, Tensor)
    stages[1].forward(0, activation, targets, tokens)
    back = stages[1].backward(0)
    assert back is not None
    direction = torch.sign(back)
    near = [
        stages[1].evaluate(activation + side * 1e-3 * direction, targets, tokens)
        for side in (-1.0, 1.0)
    ]
    by_differences = (near[1] - near[0]) / 2e-3 / spec.tokens_per_step
    assert by_differences == pytest.approx(float(back.abs().sum()), rel=2e-2)


def test_a_stage_that_is_not_told_the_tokens_is_our_mistake() -> None:
    spec = narrow()
    stages = stages_of(spec, 3)
    tokens, targets = synthetic_batch(spec)(0, 0)
    activation = stages[0].evaluate(tokens)
    with pytest.raises(AssertionError, match="every stage needs the tokens"):
        stages[1].evaluate(activation, targets)


def test_the_code_tells_tokens_and_places_apart_and_is_the_same_everywhere() -> None:
    model = narrow({**MODEL, "vocabulary": 50257, "width": 128}, 32).model
    tokens = torch.arange(50257)
    rows = token_code(model, tokens)
    assert rows.shape == (50257, 96) and set(rows.unique().tolist()) == {-STRENGTH, STRENGTH}
    packed = (rows > 0).numpy()
    assert len({row.tobytes() for row in packed}) == 50257
    nearest = (rows[:3000] @ rows[:3000].T).fill_diagonal_(0.0).abs().amax() / STRENGTH**2 / 96
    assert nearest < 0.65, "as far apart as rows that are drawn: five deviations of 96 signs"
    places = place_code(model, torch.arange(32))
    assert places is not None and len({row.numpy().tobytes() for row in places}) == 32
    some = fixed_code(model, torch.tensor([[7, 50000]]))
    assert torch.equal(some, token_code(model, torch.tensor([[7, 50000]])) + places[:2])
    known = (token_code(model, torch.tensor([7, 50000]))[:, :16] > 0).int().tolist()
    assert ["".join(map(str, row)) for row in known] == KNOWN


KNOWN = ["0010000111010000", "0001111101100001"]
"""The first signs of tokens 7 and 50000. Where these differ, a run has other losses."""


def test_models_that_turn_positions_have_a_code_of_tokens_alone() -> None:
    model = narrow(LLAMA).model
    assert place_code(model, torch.arange(4)) is None
    same = fixed_code(model, torch.tensor([[9, 9]]))
    assert torch.equal(same[0, 0], same[0, 1])


@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["gpt2", "llama"])
def test_a_plain_model_made_of_it_computes_the_same(model: dict[str, object]) -> None:
    spec = narrow(model)
    plain = ReferenceRun(spec, synthetic_batch(spec))
    list(plain.losses(3))
    states = {n: LayerState.genesis(spec, n) for n in range(layer_count(spec))}
    for number, state in states.items():
        flat = [parameter.detach().reshape(-1) for parameter in plain.model[number].parameters()]
        state.parameters.copy_(torch.cat(flat))
    copied = copied_model(spec, states)
    assert copied is not None
    tokens, targets = synthetic_batch(spec)(7, 0)
    stream = tokens
    with torch.no_grad():
        for module in copied[1]:
            stream = module(stream)
    loss = torch.nn.functional.cross_entropy(stream.flatten(0, 1), targets.flatten())
    assert float(loss) == pytest.approx(plain.held_out_loss([(tokens, targets)]), abs=1e-6)
    whole = whole_spec(spec)
    for number, module in enumerate(copied[1]):
        built = build_plain_layer(whole, number, "meta")
        shapes = [tuple(parameter.shape) for parameter in built.parameters()]
        assert [tuple(parameter.shape) for parameter in module.parameters()] == shapes


@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["gpt2", "llama"])
def test_the_workload_counts_what_there_is(model: dict[str, object]) -> None:
    spec = narrow(model)
    work = workload_of(spec)
    for layer in range(work.layer_count):
        there = sum(math.prod(shape) for _, shape in layer_entries(spec, layer))
        assert work.cost(layer).parameter_count == there
    assert work.boundary_bytes == FLOAT_BYTES * math.prod(spec.boundary_shape(1))
    wide = workload_of(run_spec(model=whole_spec(spec).model.stated()))
    assert work.boundary_bytes * 32 == wide.boundary_bytes * 12
    assert work.block.forward_flops < wide.block.forward_flops


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"written_width": 32}, "must be less than width"),
        ({"vocabulary": 2048, "written_width": 11}, "too few channels .* at most 10 may be"),
        ({"written_width": 8, "tied_head": True}, "tied_head with written_width"),
        ({"written_width": 8, "initial": "ab" * 32}, "initial with written_width"),
    ],
    ids=str,
)
def test_models_that_cannot_be_so_are_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        run_spec(model={**MODEL, **changes})


def test_runs_without_it_keep_their_names() -> None:
    assert b"written_width" not in run_spec().canonical_bytes()
    assert run_spec(model={**MODEL, "written_width": 0}).digest() == run_spec().digest()
    assert narrow().digest() != run_spec().digest()
