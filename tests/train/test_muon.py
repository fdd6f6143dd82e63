"""Muon: nearly orthogonal updates, to the same last bit in whatever order products are added."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.optimizer_spec import MuonSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import apply_outcome
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.local_steps import LocalSteps
from p2p_dtfm.train.stage.private_memory import PrivateMemory
from p2p_dtfm.train.stage.stage_runner import StageRunner
from p2p_dtfm.train.updates.layer_update import divided
from p2p_dtfm.train.updates.orthogonal import exactly_orthogonal, orthogonal
from tests.train.test_parity import TWO_BY_TWO, HandWired

SHAPES = [(96, 96), (160, 40), (40, 160), (1, 7)]
STEPS = 50


def muon(spec: RunSpec) -> RunSpec:
    optimizer = spec.optimizer.model_copy(update={"kind": "muon", "muon": MuonSpec()})
    return spec.model_copy(update={"optimizer": optimizer, "total_steps": STEPS})


def drawn(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Small whole numbers, whose squares add up exactly in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 100, (rows, columns), generator=generator) * 2.0**-20


@pytest.mark.parametrize("shape", SHAPES)
def test_all_directions_become_about_as_long(shape: tuple[int, int]) -> None:
    matrix = drawn(*shape)
    found = exactly_orthogonal(matrix)
    assert torch.allclose(found, orthogonal(matrix), atol=1e-5)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    lengths = torch.diag(left.T @ found.double() @ right.T)
    kept = values > 0.02 * values[0]
    assert kept.sum() >= 0.9 * len(values)
    assert bool(((lengths[kept] > 0.5) & (lengths[kept] < 1.21)).all())
    assert torch.equal(exactly_orthogonal(torch.zeros(shape)), torch.zeros(shape))


def test_no_order_of_additions_shows() -> None:
    """Rows and columns in another order are added in another order. In the exact form alone this
    changes nothing, and one thread or two give the same."""
    matrix = drawn(130, 300)
    rows, columns = torch.randperm(130), torch.randperm(300)
    exact = exactly_orthogonal(matrix)
    assert torch.equal(exactly_orthogonal(matrix[rows][:, columns]), exact[rows][:, columns])
    assert torch.equal(exactly_orthogonal(matrix.T.contiguous()), exact.T)
    rounded = orthogonal(matrix)
    assert not torch.equal(orthogonal(matrix[rows][:, columns]), rounded[rows][:, columns])
    try:
        torch.set_num_threads(2)
        assert torch.equal(exactly_orthogonal(matrix), exact)
    finally:
        torch.set_num_threads(1)


def test_matrices_of_blocks_alone_are_muons(spec: RunSpec) -> None:
    spec = muon(spec)
    block = LayerState.genesis(spec, 1)
    matrices, rest = divided(spec, 1, block.shapes)
    taken = [element for part in (*matrices, *rest) for element in range(*_edges(part.place))]
    assert sorted(taken) == list(range(block.parameter_count)), "each element once"
    width = spec.model.width
    sizes = [(each.rows, each.columns) for each in matrices]
    assert sizes == [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    assert all(len(shape) == 1 for part in rest for shape in part.shapes)
    for layer in (0, spec.model.layers + 1):
        assert divided(spec, layer, LayerState.genesis(spec, layer).shapes)[0] == []


def _edges(place: slice) -> tuple[int, int]:
    return place.start, place.stop


Batch = Callable[[int, int], tuple[Tensor, Tensor]]


def test_fifty_steps_in_step_equal_the_plain_loop(spec: RunSpec, toy_batch: Batch) -> None:
    spec = muon(spec)
    reference, swarm = ReferenceRun(spec, toy_batch), HandWired(spec, TWO_BY_TWO, toy_batch, False)
    expected = list(reference.losses(STEPS))
    assert [swarm.step(step) for step in range(STEPS)] == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 0.5, "nothing was learnt, so nothing was compared"
    for layer in range(spec.model.layers + 2):
        held = [r.layer_states[layer] for r in swarm.runners.values() if layer in r.layer_states]
        assert len({state.digest() for state in held}) == 1, "replicas must stay byte-equal"


def test_a_state_that_was_moved_goes_on_as_if_it_had_stayed(spec: RunSpec) -> None:
    """A checkpoint, a donor's bytes, and a guardian's or a follower's copy move it: momentum is in
    it."""
    spec = muon(spec)
    stayed = LayerState.genesis(spec, 1)
    gradients = [torch.randn(stayed.parameter_count) for _ in range(6)]
    for step, gradient in enumerate(gradients[:3]):
        apply_outcome(spec, stayed, gradient, step, 1.0)
    moved = LayerState.from_bytes(spec, 1, stayed.to_bytes())
    fresh = LayerState.from_bytes(spec, 1, stayed.to_bytes())
    fresh.first_moments.zero_()
    for step, gradient in enumerate(gradients[3:], start=3):
        for state in (stayed, moved, fresh):
            apply_outcome(spec, state, gradient, step, 1.0)
    assert moved.digest() == stayed.digest() != fresh.digest()


def test_inner_steps_keep_no_second_moments_of_matrices(spec: RunSpec, toy_batch: Batch) -> None:
    """The planner knows what that saves."""
    sync = spec.sync.model_copy(update={"mode": "local", "inner_steps": 1})
    adam_w = spec.model_copy(update={"sync": sync})
    kept = {}
    for each in (adam_w, muon(adam_w)):
        states = {layer: LayerState.genesis(each, layer) for layer in range(5)}
        memory = PrivateMemory()
        steps, runner = LocalSteps(each, states, memory), StageRunner(each, states)
        steps.begin(0)
        tokens, targets = toy_batch(0, 0)
        runner.forward(0, tokens, targets)
        runner.backward(0)
        steps.inner_step(0, 1)
        steps.finish(1)
        memory.commit(0)
        kept[each.optimizer.kind] = memory.of(2).moments.numel()
        assert memory.of(0).moments.numel() == 2 * states[0].parameter_count
    of_muon, _ = divided(muon(adam_w), 2, states[2].shapes)
    matrices = sum(each.rows * each.columns for each in of_muon)
    assert kept["adamw"] - kept["muon"] == matrices
    work, leaner = workload_of(adam_w), workload_of(muon(adam_w))
    assert work.block.state_bytes - leaner.block.state_bytes == 2 * 4 * matrices
    assert leaner.embedding == work.embedding
