"""Real engines over real streams, with codecs and with local steps."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import (
    CodecSpec,
    RunSpec,
    SparseSpec,
    SyncSpec,
)
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.net.streams.frames import FrameHeader
from p2p_dtfm.testbed.local_swarm import LocalSwarm
from p2p_dtfm.testbed.plain_losses import plain_losses
from p2p_dtfm.train.model.optimizer import update_of
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec, stated
from tests.e2e.helpers import DEADLINE_S, losses, step_of, wait_until, write_spec
from tests.e2e.swarm_in_process import VIEW, EnginePeer, engine_peers, prepare_engines, run_all
from tests.e2e.test_parity import assert_replicas_are_equal, even_plan, synthetic_batch
from tests.train.local_reference import LocalReferenceRun

STEPS = 6
INT8 = CodecSpec(
    activations=("int8",),
    gradients=("int8",),
    reduction="sparse",
    sparse=SparseSpec(one_in=2, keep_percent=50, bits=4),
)
SIGNS = CodecSpec(reduction="sign")
MUON = OptimizerSpec(peak_learning_rate=1e-3, kind="muon")
ADAM = OptimizerSpec(peak_learning_rate=1e-3)
EIGHTH = CodecSpec(activations=("subspace",), gradients=("subspace",))
LOCAL = SyncSpec(mode="local", inner_steps=2, outer_learning_rate=0.9, outer_momentum=0.3)


class Wire:
    """Counts what the peers send, by codec and kind."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, str], int] = {}

    def watch(self, peer: EnginePeer) -> None:
        deliver = peer.on_frame

        def seen(sender: str, header: FrameHeader, payload: bytearray) -> None:
            key = (header.kind.value, header.codec)
            self.bytes[key] = self.bytes.get(key, 0) + len(payload)
            deliver(sender, header, payload)

        peer.bulk._incoming.listeners = replace(peer.bulk._incoming.listeners, frame=seen)


async def train(peers: list[EnginePeer], plan: Plan, spec: RunSpec) -> list[float]:
    prepare_engines(peers, plan, spec, synthetic_batch(spec))
    seen = []
    for step in range(STEPS):
        results = await run_all(peers, step)
        transaction = StepTransaction(VIEW, step, plan)
        for peer, local in zip(peers, results, strict=True):
            local_result = (local.squared_norms, local.loss_sum, local.token_count, 0.0, 0)
            prepared = Prepared(VIEW, step, peer.host.peer_id, *local_result, None)
            transaction.record(stated(prepared))
        outcome = transaction.outcome()
        assert outcome is not None and outcome.loss is not None
        seen.append(outcome.loss)
        for peer in peers:
            for layer, state in peer.engine.states.items():
                update = update_of(spec, step, outcome.gradient_norm)
                state.apply(peer.engine.reduced[layer], *update)
            peer.memory.commit(step, VIEW)
    assert not any(peer.faults for peer in peers)
    return seen


def trained(spec: RunSpec, stages: tuple[int, ...], folder: Path) -> tuple[list[float], Plan, Wire]:
    wire = Wire()

    async def scenario() -> tuple[list[float], Plan]:
        async with engine_peers(sum(stages), folder, spec) as peers:
            for peer in peers:
                wire.watch(peer)
            plan = even_plan([peer.host.peer_id for peer in peers], stages, spec)
            seen = await train(peers, plan, spec)
            assert_replicas_are_equal(peers, plan)
            return seen, plan

    torch.set_num_threads(1)
    return *asyncio.run(asyncio.wait_for(scenario(), 120)), wire


def test_int8_boundaries_and_sparse_reduction(tmp_path: Path) -> None:
    spec = run_spec().model_copy(update={"codecs": INT8})
    seen, _, wire = trained(spec, (2, 2), tmp_path)
    expected = list(ReferenceRun(spec, synthetic_batch(spec)).losses(STEPS))
    assert seen[0] == pytest.approx(expected[0], abs=1e-3), "int8 disturbs a loss only slightly"
    assert seen == pytest.approx(expected, rel=0.05)
    assert seen[-1] < seen[0] - 0.05, "it learns"
    assert set(wire.bytes) == {
        ("activation", "int8"),
        ("activation_gradient", "int8"),
        ("gradient_part", "sparse"),
        ("gradient_sum", "sparse"),
    }


@pytest.mark.parametrize("stages", [(2, 1), (1, 1)])
def test_local_steps_equal_the_plain_loop(tmp_path: Path, stages: tuple[int, ...]) -> None:
    spec = run_spec().model_copy(update={"sync": LOCAL})
    seen, plan, _ = trained(spec, stages, tmp_path)
    shares = [pipeline.microbatches for pipeline in plan.pipelines]
    expected = list(LocalReferenceRun(spec, synthetic_batch(spec), shares).losses(STEPS))
    assert seen == pytest.approx(expected, abs=1e-4)
    assert seen[-1] < seen[0] - 0.05, "it learns"


@pytest.mark.parametrize(
    ("codecs", "changes"), [(INT8, {}), (SIGNS, {"optimizer": MUON})], ids=["sparse", "sign"]
)
def test_local_steps_with_few_bytes(
    tmp_path: Path, codecs: CodecSpec, changes: dict[str, object]
) -> None:
    spec = run_spec().model_copy(update={"sync": LOCAL, "codecs": codecs, **changes})
    seen, plan, wire = trained(spec, (2, 1), tmp_path)
    shares = [pipeline.microbatches for pipeline in plan.pipelines]
    expected = list(LocalReferenceRun(spec, synthetic_batch(spec), shares).losses(STEPS))
    assert seen == pytest.approx(expected, rel=0.05)
    assert seen[-1] < seen[0] - 0.05, "it learns"
    parts = {codec for kind, codec in wire.bytes if kind.startswith("gradient_")}
    assert parts == {codecs.reduction}


def test_muon_in_step_equals_the_plain_loop(tmp_path: Path) -> None:
    """Replicas that are cut unlike come to the same bits, and to the plain loop's losses."""
    spec = run_spec().model_copy(update={"optimizer": MUON})
    seen, _, _ = trained(spec, (2, 1), tmp_path)
    expected = list(ReferenceRun(spec, synthetic_batch(spec)).losses(STEPS))
    assert seen == pytest.approx(expected, abs=1e-4)
    assert seen[-1] < seen[0] - 0.05, "it learns"


@pytest.mark.nightly
def test_daemons_train_with_muon_through_a_join_and_a_crash(tmp_path: Path) -> None:
    """The daemons are in step, so every loss is the plain loop's: states that moved brought their
    momentum."""
    steps = 60
    spec = write_spec(
        tmp_path,
        total_steps=steps,
        model={"layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256},
        batch={"global_batch": 24, "microbatch": 2},
        evaluation={"every_steps": 30, "sequences": 8},
        checkpoint={"every_steps": 20, "keep": 2},
        optimizer={
            "peak_learning_rate": 3e-4, "kind": "muon", "muon": {"peak_learning_rate": 2e-3},
        },
    )  # fmt: skip
    with LocalSwarm(tmp_path, ["--threads", "1", "--exit-when-done"]) as swarm:
        founder, address = swarm.found(["--run", str(spec), "--expect-peers", "2"])
        victim = swarm.join(address)
        wait_until(lambda: step_of(founder) >= 5, "five steps")
        joiner = swarm.join(address)
        wait_until(lambda: step_of(joiner) >= 20, "the joiner's steps")
        os.kill(victim.process.pid, signal.SIGKILL)
        for child in (founder, joiner):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    expected = plain_losses(founder.home, steps)
    found = losses(founder)
    assert expected is not None and list(found) == list(range(steps))
    assert max(abs(found[n] - expected[n]) for n in range(steps)) < 1e-4
    assert expected[-1] < expected[0] - 1.0, "it learns"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("codecs", "optimizer"),
    [(INT8, ADAM), (SIGNS, MUON), (EIGHTH, ADAM)],
    ids=["sparse", "sign", "subspace"],
)
def test_daemons_train_compressed_and_locally_through_a_crash(
    tmp_path: Path, codecs: CodecSpec, optimizer: OptimizerSpec
) -> None:
    """Few bytes travel, steps are local, and one of three daemons is killed in the middle."""
    steps = 60
    spec = write_spec(
        tmp_path,
        total_steps=steps,
        model={"layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256},
        batch={"global_batch": 24, "microbatch": 2},
        evaluation={"every_steps": 30, "sequences": 8},
        codecs=codecs.model_dump(),
        optimizer=optimizer.model_dump(),
        sync=LOCAL.model_dump(),
    )
    with LocalSwarm(tmp_path, ["--threads", "1", "--exit-when-done"]) as swarm:
        founder, address = swarm.found(["--run", str(spec), "--expect-peers", "3"])
        victim, other = swarm.join(address), swarm.join(address)
        wait_until(lambda: step_of(founder) >= 10, "ten steps")
        os.kill(victim.process.pid, signal.SIGKILL)
        for child in (founder, other):
            assert child.process.wait(DEADLINE_S) == 0, child.log_tail()
    found = losses(founder)
    assert list(found) == list(range(steps)), "no committed step is lost or repeated"
    assert losses(other) == found
    assert found[steps - 1] < found[0] - 1.0, "it learns"
