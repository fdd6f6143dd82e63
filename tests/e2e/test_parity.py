"""Golden test: however a step is spread over peers, its loss equals the plain loop's."""

import asyncio
from functools import cache
from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage, check_plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.optimizer import clip_scale, learning_rate
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec, stated
from tests.e2e.swarm_in_process import VIEW, EnginePeer, engine_peers, prepare_engines, run_all

STEPS = 12
FEW = 4
"""The tolerance where copies are bits: a copy that is off is so after the first step."""
TOLERANCE = 1e-4


def even_plan(peer_ids: list[str], stage_counts: tuple[int, ...], spec: RunSpec) -> Plan:
    """A plan of pipelines with these stage counts; microbatches in proportion to the stages."""
    layers, microbatches, total = spec.model.layers + 2, spec.microbatches_per_step, 0
    pipelines = []
    for count in stage_counts:
        first = microbatches * total // len(peer_ids)
        end = microbatches * (total + count) // len(peer_ids)
        stages = tuple(
            Stage(peer, layers * n // count, layers * (n + 1) // count, count - n)
            for n, peer in enumerate(peer_ids[total : total + count])
        )
        pipelines.append(Pipeline(stages, first, end - first))
        total += count
    plan = Plan(tuple(pipelines), (), 0)
    check_plan(plan, layers, microbatches, set(peer_ids))
    return plan


def synthetic_batch(spec: RunSpec):
    """Text-like tokens that follow from (step, microbatch) alone."""

    def batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + index)
        shape = (spec.batch.microbatch, spec.model.context + 1)
        tokens = torch.randint(0, 256, shape, generator=generator) // 4 + 60
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


@cache
def plain_losses(spec: RunSpec) -> tuple[float, ...]:
    """The losses of one process, which are the same for every way to spread the steps."""
    return tuple(ReferenceRun(spec, synthetic_batch(spec)).losses(STEPS))


async def train(
    peers: list[EnginePeer], plan: Plan, spec: RunSpec, steps: int = STEPS
) -> list[float]:
    prepare_engines(peers, plan, spec, synthetic_batch(spec))
    losses = []
    for step in range(steps):
        results = await run_all(peers, step, evaluate=step == 3)
        transaction = StepTransaction(VIEW, step, plan)
        for peer, local in zip(peers, results, strict=True):
            prepared = Prepared(
                VIEW,
                step,
                peer.host.peer_id,
                local.squared_norms,
                local.loss_sum,
                local.token_count,
                local.held_out_loss_sum,
                local.held_out_token_count,
                None,
            )
            transaction.record(stated(prepared))
        outcome = transaction.outcome()
        assert outcome is not None and outcome.loss is not None
        assert (outcome.held_out_loss is not None) == (step == 3)
        losses.append(outcome.loss)
        scale = clip_scale(outcome.gradient_norm, spec.optimizer.clip_norm)
        for peer in peers:
            for layer, state in peer.engine.states.items():
                state.apply(peer.engine.reduced[layer], scale, learning_rate(spec, step))
    return losses


def assert_replicas_are_equal(peers: list[EnginePeer], plan: Plan) -> None:
    by_id = {peer.host.peer_id: peer for peer in peers}
    for layer in range(plan.pipelines[0].stages[-1].end_layer):
        digests = {by_id[holder].engine.states[layer].digest() for holder in plan.holders(layer)}
        assert len(digests) == 1, f"replicas of layer {layer} differ"


def assert_lanes_are_direct(peers: list[EnginePeer]) -> None:
    lanes = [(peer, to, lane) for peer in peers for to, lane in peer.bulk._outgoing]
    assert lanes and all(peer.bulk.is_direct(to, lane) for peer, to, lane in lanes)


@pytest.mark.parametrize(
    ("stage_counts", "direct"),
    [((1,), False), ((2,), False), ((2, 2), True), ((2, 1), False)],
    ids=str,
)
def test_the_loss_equals_the_plain_loop(
    stage_counts: tuple[int, ...], direct: bool, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    spec = run_spec()
    expected = plain_losses(spec)

    async def run() -> list[float]:
        async with engine_peers(sum(stage_counts), tmp_path, spec, direct) as peers:
            plan = even_plan([peer.host.peer_id for peer in peers], stage_counts, spec)
            losses = await train(peers, plan, spec)
            assert_replicas_are_equal(peers, plan)
            assert not any(peer.faults for peer in peers)
            if direct:
                assert_lanes_are_direct(peers)
            return losses

    losses = asyncio.run(run())
    differences = [abs(a - b) for a, b in zip(losses, expected, strict=True)]
    assert max(differences) < TOLERANCE, differences
    assert expected[-1] < expected[0], "the plain loop itself must learn"


@pytest.mark.parametrize("stage_counts", [(1,), (1, 1), (2,), (1, 3)], ids=str)
def test_a_tied_head_stays_the_embedding(stage_counts: tuple[int, ...], tmp_path: Path) -> None:
    """Norms count the matrix once, and both copies are the same bits wherever they lie."""
    torch.set_num_threads(1)
    model = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 256}
    spec = run_spec(model=model | {"tied_head": True}, optimizer={"peak_learning_rate": 1e-2})
    expected = plain_losses(spec)

    async def run() -> list[float]:
        async with engine_peers(sum(stage_counts), tmp_path, spec) as peers:
            plan = even_plan([peer.host.peer_id for peer in peers], stage_counts, spec)
            losses = await train(peers, plan, spec)
            assert_replicas_are_equal(peers, plan)
            last = spec.model.layers + 1
            states = [peer.engine.states for peer in peers]
            copies = [held[0].parameters[: 256 * 32] for held in states if 0 in held]
            copies += [held[last].parameters[-256 * 32 :] for held in states if last in held]
            assert len(copies) == 2 * len(stage_counts)
            assert all(torch.equal(copy, copies[0]) for copy in copies)
            assert copies[0].std() > 0.03, "it has moved, as one"
            return losses

    losses = asyncio.run(run())
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < TOLERANCE


def test_a_tied_head_is_one_matrix_with_a_lossy_reduction_too(tmp_path: Path) -> None:
    """Two pipelines are cut differently; what the ends give each other is not encoded."""
    torch.set_num_threads(1)
    model = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 256}
    spec = run_spec(model=model | {"tied_head": True}, codecs={"reduction": "int8"})

    async def run() -> None:
        async with engine_peers(5, tmp_path, spec) as peers:
            plan = even_plan([peer.host.peer_id for peer in peers], (2, 3), spec)
            await train(peers, plan, spec, FEW)
            states = [peer.engine.states for peer in peers]
            copies = [held[0].parameters[: 256 * 32] for held in states if 0 in held]
            copies += [held[3].parameters[-256 * 32 :] for held in states if 3 in held]
            assert len(copies) == 4
            assert all(torch.equal(copy, copies[0]) for copy in copies)

    asyncio.run(run())
