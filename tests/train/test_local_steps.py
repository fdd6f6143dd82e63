"""Local steps of hand-wired stages and replicas equal the plain loop's."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.run_spec import RunSpec, SyncSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import update_of
from p2p_dtfm.train.stage.local_steps import (
    InnerMoments,
    LocalSteps,
    even_ranges,
    inner_microbatches,
)
from p2p_dtfm.train.stage.private_memory import PrivateMemory
from p2p_dtfm.train.stage.stage_runner import StageRunner
from tests.train.holders import reduce_gradients
from tests.train.local_reference import LocalReferenceRun

Batch = Callable[[int, int], tuple[Tensor, Tensor]]
STEPS = 5


@pytest.fixture(scope="module")
def local_spec(spec: RunSpec) -> RunSpec:
    sync = SyncSpec(mode="local", inner_steps=2, outer_learning_rate=0.8, outer_momentum=0.6)
    return spec.model_copy(update={"sync": sync})


def stage(peer_id: str, first: int, end: int) -> Stage:
    return Stage(peer_id=peer_id, first_layer=first, end_layer=end, in_flight=2)


UNEVEN = Plan(
    (
        Pipeline((stage("a", 0, 2), stage("b", 2, 5)), 0, 1),
        Pipeline((stage("c", 0, 5),), 1, 3),
    ),
    (),
    0,
)


class Peer:
    """One stage-holder."""

    def __init__(self, spec: RunSpec, place: Stage) -> None:
        self.states = {n: LayerState.genesis(spec, n) for n in place.layers}
        self.runner = StageRunner(spec, self.states)
        self.memory: PrivateMemory[InnerMoments] = PrivateMemory()
        self.steps = LocalSteps(spec, self.states, self.memory)


class Swarm:
    """All peers of a plan in one process."""

    def __init__(self, spec: RunSpec, plan: Plan, batch: Batch) -> None:
        self.spec, self.plan, self.batch = spec, plan, batch
        self.peers = {s.peer_id: Peer(spec, s) for p in plan.pipelines for s in p.stages}

    def attempt(self, step: int) -> float:
        """Run up to the point where Prepared could be said."""
        loss_sum = 0.0
        for pipeline in self.plan.pipelines:
            peers = [self.peers[s.peer_id] for s in pipeline.stages]
            for peer in peers:
                peer.steps.begin(step)
            for number, group in enumerate(inner_microbatches(self.spec, pipeline.microbatches)):
                loss_sum += sum(self._flow(peers, step, microbatch) for microbatch in group)
                for peer in peers:
                    peer.steps.inner_step(number, len(group))
            for peer in peers:
                peer.steps.finish(pipeline.microbatch_count)
        return loss_sum / self.spec.tokens_per_step

    def _flow(self, peers: list[Peer], step: int, microbatch: int) -> float:
        stream, targets = self.batch(step, microbatch)
        for peer in peers[:-1]:
            stream = peer.runner.forward(microbatch, stream)
        loss = peers[-1].runner.forward(microbatch, stream, targets)
        gradient = None
        for peer in reversed(peers):
            gradient = peer.runner.backward(microbatch, gradient)
        return loss

    def commit(self, step: int) -> None:
        for segment in self.plan.segments():
            holders = [self.peers[p] for p in segment.holders]
            states = [[peer.states[n] for n in segment.layers] for peer in holders]
            for peer, side in zip(holders, reduce_gradients(self.spec, step, states), strict=True):
                for layer, part in side.reduced_layers().items():
                    peer.states[layer].apply(part, *update_of(self.spec, step, 1.0))
        for peer in self.peers.values():
            peer.memory.commit(step)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_losses_and_parameters_equal_the_plain_loop(
    local_spec: RunSpec, toy_batch: Batch, kind: str
) -> None:
    optimizer = local_spec.optimizer.model_copy(update={"kind": kind})
    local_spec = local_spec.model_copy(update={"optimizer": optimizer})
    shares = [p.microbatches for p in UNEVEN.pipelines]
    reference = LocalReferenceRun(local_spec, toy_batch, shares)
    swarm = Swarm(local_spec, UNEVEN, toy_batch)
    expected = list(reference.losses(STEPS))
    assert expected[-1] < expected[0] - 0.1, "nothing was learnt, so nothing was compared"
    for step in range(STEPS):
        assert swarm.attempt(step) == pytest.approx(expected[step], abs=1e-5)
        swarm.commit(step)
    for layer, module in enumerate(reference.model):
        held = [p.states[layer] for p in swarm.peers.values() if layer in p.states]
        assert len({state.digest() for state in held}) == 1 and held[0].version == STEPS
        wanted = torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])
        seen = torch.cat([p.detach().reshape(-1) for p in held[0].module.parameters()])
        assert torch.equal(seen, held[0].parameters), "the module computes with what is shared"
        assert float((held[0].parameters - wanted).abs().median()) < 1e-6


def test_a_step_that_is_made_again_gives_the_same(local_spec: RunSpec, toy_batch: Batch) -> None:
    """Whatever an attempt did leaves no trace, short of a commit."""
    undisturbed, disturbed = (Swarm(local_spec, UNEVEN, toy_batch) for _ in range(2))
    for step in range(3):
        undisturbed.attempt(step)
        undisturbed.commit(step)
        before = {p: {n: s.digest() for n, s in x.states.items()} for p, x in _items(disturbed)}
        disturbed.attempt(step)
        after = {p: {n: s.digest() for n, s in x.states.items()} for p, x in _items(disturbed)}
        assert before == after, "shared state stays as it is until the commit"
        for _, peer in _items(disturbed):
            peer.memory.discard()
            peer.runner.zero_gradients()
            peer.steps.begin(step)  # this attempt ends in the middle
            peer.steps.abandon()
        disturbed.attempt(step)
        disturbed.commit(step)
    for peer_id, peer in _items(undisturbed):
        for layer, state in peer.states.items():
            assert state.digest() == disturbed.peers[peer_id].states[layer].digest()


def _items(swarm: Swarm) -> list[tuple[str, Peer]]:
    return list(swarm.peers.items())


def test_inner_steps_use_each_microbatch_once(local_spec: RunSpec) -> None:
    for share in (range(0, 1), range(3, 4), range(1, 4), range(2, 9)):
        groups = inner_microbatches(local_spec, share)
        assert len(groups) == 2 and [n for group in groups for n in group] == list(share)


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_ranges_cover_everything_evenly(length: int, count: int) -> None:
    ranges = even_ranges(length, count)
    assert len(ranges) == count and ranges[0][0] == 0 and ranges[-1][1] == length
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1


def test_private_memory_counts_a_step_once() -> None:
    memory: PrivateMemory[str] = PrivateMemory()
    memory.propose(4, {0: "first attempt", 1: "first attempt"})
    memory.discard()
    memory.commit(4)
    assert memory.of(0) is None
    memory.propose(4, {0: "a"})
    assert memory.of(0) is None
    memory.propose(4, {1: "b"})
    memory.commit(4)
    assert (memory.of(0), memory.of(1)) == ("a", "b")
    memory.propose(5, {0: "c"})
    memory.commit(6)
    assert memory.of(0) == "a", "what was proposed for another step does not count"
    memory.keep_only([1, 2])
    assert memory.of(0) is None and memory.of(1) == "b"
    memory.propose(7, {1: "d", 2: "e"})
    memory.forget([1])
    assert memory.of(1) is None
    memory.commit(7)
    assert (memory.of(1), memory.of(2)) == (None, "e")
