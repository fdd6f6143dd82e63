"""Stages and replicas wired by hand compute what the plain loop computes."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Segment, Stage
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import clip_scale, learning_rate
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.segment_reduction import SegmentReduction
from p2p_dtfm.train.stage.stage_runner import StageRunner
from p2p_dtfm.train.stage.tensor_bytes import tensor_from_bytes, tensor_to_bytes
from p2p_dtfm.train.updates.exact_sums import squared_norm
from tests.train.holders import reduce_gradients

Batch = Callable[[int, int], tuple[Tensor, Tensor]]

STEPS = 6


def stage(peer_id: str, first: int, end: int) -> Stage:
    return Stage(peer_id=peer_id, first_layer=first, end_layer=end, in_flight=2)


ONE_PEER = Plan((Pipeline((stage("a", 0, 5),), 0, 4),), (), 0)
TWO_STAGES = Plan((Pipeline((stage("a", 0, 2), stage("b", 2, 5)), 0, 4),), (), 0)
TWO_BY_TWO = Plan(
    (
        Pipeline((stage("a", 0, 2), stage("b", 2, 5)), 0, 2),
        Pipeline((stage("c", 0, 3), stage("d", 3, 5)), 2, 2),
    ),
    (),
    0,
)
TWO_AND_ONE = Plan(
    (
        Pipeline((stage("a", 0, 2), stage("b", 2, 5)), 0, 1),
        Pipeline((stage("c", 0, 5),), 1, 3),
    ),
    (),
    0,
)
STAGE_PER_LAYER = Plan(
    (Pipeline(tuple(stage(p, n, n + 1) for n, p in enumerate("abcde")), 0, 4),), (), 0
)


class HandWired:
    """All peers of a plan in one process; the test hands bytes over instead of sending them."""

    def __init__(self, spec: RunSpec, plan: Plan, batch: Batch, recompute: bool) -> None:
        self.spec = spec
        self.batch = batch
        self.plan = plan
        self.runners = {
            s.peer_id: StageRunner(
                spec, {n: LayerState.genesis(spec, n) for n in s.layers}, recompute
            )
            for p in plan.pipelines
            for s in p.stages
        }

    def step(self, step: int) -> float:
        loss_sum = math.fsum(self._flow(pipeline, step) for pipeline in self.plan.pipelines)
        segments = self.plan.segments()
        reduced = [self._reduce(segment, step) for segment in segments]
        norm = math.sqrt(math.fsum(squared_norm(sides[0].reduced) for sides in reduced))
        scale = clip_scale(norm, self.spec.optimizer.clip_norm)
        for segment, sides in zip(segments, reduced, strict=True):
            for peer_id, side in zip(segment.holders, sides, strict=True):
                for layer, part in side.reduced_layers().items():
                    state = self.runners[peer_id].layer_states[layer]
                    state.apply(part, scale, learning_rate(self.spec, step))
        return loss_sum / self.spec.tokens_per_step

    def _flow(self, pipeline: Pipeline, step: int) -> float:
        """All forwards, then all backwards: GPipe."""
        runners = [self.runners[s.peer_id] for s in pipeline.stages]
        loss_sum = 0.0
        for microbatch in pipeline.microbatches:
            tokens, targets = self.batch(step, microbatch)
            stream = tokens
            for runner in runners[:-1]:
                stream = _over_the_wire(runner.forward(microbatch, stream, tokens=tokens))
            loss_sum += runners[-1].forward(microbatch, stream, targets, tokens)
        for microbatch in pipeline.microbatches:
            gradient = runners[-1].backward(microbatch)
            for runner in reversed(runners[:-1]):
                gradient = runner.backward(microbatch, _over_the_wire(gradient))
            assert gradient is None
        assert all(runner.in_flight == 0 for runner in runners)
        return loss_sum

    def _reduce(self, segment: Segment, step: int) -> list[SegmentReduction]:
        """The reduction of a segment, one side for each holder."""
        runners = [self.runners[peer_id] for peer_id in segment.holders]
        held = [[runner.layer_states[layer] for layer in segment.layers] for runner in runners]
        return reduce_gradients(self.spec, step, held)


def _over_the_wire(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, Tensor) and tensor.is_contiguous() and not tensor.requires_grad
    return tensor_from_bytes(bytes(tensor_to_bytes(tensor)), tensor.shape)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "plan",
    [ONE_PEER, TWO_STAGES, TWO_BY_TWO, TWO_AND_ONE, STAGE_PER_LAYER],
    ids=["one peer", "two stages", "two by two", "two and one", "stage per layer"],
)
def test_losses_and_parameters_equal_the_plain_loop(
    spec: RunSpec, toy_batch: Batch, plan: Plan, recompute: bool
) -> None:
    reference = ReferenceRun(spec, toy_batch)
    swarm = HandWired(spec, plan, toy_batch, recompute)
    expected = list(reference.losses(STEPS))
    assert [swarm.step(step) for step in range(STEPS)] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.05, "nothing was learnt, so nothing was compared"
    for layer, module in enumerate(reference.model):
        held = [r.layer_states[layer] for r in swarm.runners.values() if layer in r.layer_states]
        assert {state.version for state in held} == {STEPS}
        assert len({state.digest() for state in held}) == 1, "replicas must stay byte-equal"
        _require_close(held[0].module, module)


def _require_close(module: torch.nn.Module, wanted: torch.nn.Module) -> None:
    """Compare all parameters except the keys' bias. Attention does not depend on it, so its
    gradient is rounding noise, which AdamW amplifies."""
    for (name, ours), theirs in zip(module.named_parameters(), wanted.parameters(), strict=True):
        difference = (ours - theirs).detach().abs()
        if name == "attention_input.bias":
            width = difference.numel() // 3
            difference[width : 2 * width] = 0
        assert difference.max().item() < 1e-4, name


def test_recomputation_gives_the_same_bits(spec: RunSpec, toy_batch: Batch) -> None:
    kept, recomputed = (
        HandWired(spec, TWO_STAGES, toy_batch, recompute) for recompute in (False, True)
    )
    for step in range(2):
        assert kept.step(step) == recomputed.step(step)
    for peer_id, runner in kept.runners.items():
        for layer, state in runner.layer_states.items():
            assert state.digest() == recomputed.runners[peer_id].layer_states[layer].digest()


def test_held_out_loss_through_stages_equals_the_plain_loop(
    spec: RunSpec, toy_batch: Batch
) -> None:
    reference = ReferenceRun(spec, toy_batch)
    first = StageRunner(spec, {n: LayerState.genesis(spec, n) for n in (0, 1)})
    second = StageRunner(spec, {n: LayerState.genesis(spec, n) for n in (2, 3, 4)})
    inputs, targets = toy_batch(99, 0)
    loss = second.evaluate(first.evaluate(inputs), targets) / targets.numel()
    assert loss == pytest.approx(reference.held_out_loss([(inputs, targets)]), abs=1e-6)
    assert first.in_flight == second.in_flight == 0


def test_the_plain_loop_leaves_torch_the_threads_that_it_had(
    spec: RunSpec, toy_batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop takes the threads for its own step. Two threads of a small model's loop, beside any
    other load, were a hundred times slower than one."""
    run = ReferenceRun(spec, toy_batch)
    before, step = torch.get_num_threads(), run._step
    seen: list[int] = []

    def watched(number: int) -> float:
        seen.append(torch.get_num_threads())
        return step(number)

    monkeypatch.setattr(run, "_step", watched)
    losses = list(run.losses(2, threads=before + 1))
    assert seen == [before + 1] * 2 and torch.get_num_threads() == before and len(losses) == 2
