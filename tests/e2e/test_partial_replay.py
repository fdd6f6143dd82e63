"""A stage-holder is lost in the middle of a step. What the others have computed is kept, and the
loss is that of the plain loop. Engines in one process talk over real libp2p.
`core.recovery.partial_replay` computes who takes part in a view, and what is kept, from what the
engines said, as the agreement does."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.messages.agreement_messages import Contribution, PendingStep
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.partial_replay import PartialReplay, replay_of
from p2p_dtfm.daemon.step.mailbox import Mailbox
from p2p_dtfm.daemon.step.stage_tools import StageListeners, StagePlace, StageTools
from p2p_dtfm.daemon.step.step_engine import LocalResult, StepEngine
from p2p_dtfm.daemon.telemetry.step_recorder import StepRecorder
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import update_of
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec, stated
from tests.e2e.helpers import DEADLINE_S
from tests.e2e.swarm_in_process import EnginePeer, engine_peers
from tests.e2e.test_parity import TOLERANCE, even_plan, synthetic_batch

QUIET_POLLS = 10
POLL_S = 0.01


@dataclass
class Swarm:
    """Peers whose engines live in one view after the other."""

    peers: dict[str, EnginePeer]
    spec: RunSpec
    plan: Plan
    states: dict[str, dict[int, LayerState]] = field(default_factory=dict)
    progress: dict[str, StageProgress | None] = field(default_factory=dict)
    recorders: dict[str, StepRecorder] = field(default_factory=dict)
    view: ViewId = field(default_factory=lambda: ViewId(1, "0" * 64))
    running: dict[str, "asyncio.Task[LocalResult]"] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a peer tells how far it is."""

    def enter(self, step: int, plan: Plan, replay: PartialReplay | None = None) -> None:
        """Each peer with a stage takes its place in a new view."""
        self.plan = plan
        self.view = ViewId(self.view.number + 1, "0" * 64)
        kept = {name: self.peers[name].engine for name in plan.stage_holders()}
        for name in plan.stage_holders():
            mailbox = Mailbox(self.view, plan, name, self.spec)
            if replay is not None:
                mailbox.replay(step, replay.stage(plan, name))
            states = {layer: self.states[name][layer] for layer in plan.layers_of(name)}
            before = kept[name]
            goes_on = before is not None and list(before.states.values()) == list(states.values())
            peer = self.peers[name]
            recorder = self.recorders.setdefault(name, StepRecorder())
            peer.engine = StepEngine(
                StagePlace(plan, name, self.spec, recompute=self.view.number % 3 == 0),
                states,
                peer.links(mailbox),
                StageTools(peer.compute, peer.memory, synthetic_batch(self.spec), recorder),
                StageListeners(lambda _, progress, name=name: self.told(name, progress)),
                work=before.work if goes_on else None,
            )

    def told(self, name: str, progress: StageProgress | None) -> None:
        self.progress[name] = progress
        self.news.set()

    async def until_forwards(self, name: str, count: int) -> None:
        """Wait until the peer has done so many forwards. It checks only at news, since checking in
        each turn of the loop takes the processor from those that compute."""
        async with asyncio.timeout(DEADLINE_S):
            while count_of(self.progress.get(name)) < count:
                self.news.clear()
                await self.news.wait()

    def start(self, step: int, replay: PartialReplay | None = None) -> None:
        for name in self.plan.stage_holders():
            engine = self.peers[name].engine
            mine = None if replay is None else replay.stage(self.plan, name)
            coroutine = engine.run(step, train=True, evaluate=False, replay=mine)
            self.running[name] = asyncio.create_task(coroutine)

    async def stop(self, name: str) -> None:
        task = self.running.pop(name)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def commit(self, step: int) -> float:
        """All stage-holders end the step. Returns its loss."""
        transaction = StepTransaction(self.view, step, self.plan)
        async with asyncio.timeout(DEADLINE_S):
            results = await asyncio.gather(*self.running.values())
            for name, local in zip(self.running, results, strict=True):
                local_result = (local.squared_norms, local.loss_sum, local.token_count, 0.0, 0)
                prepared = Prepared(self.view, step, name, *local_result, None)
                transaction.record(stated(prepared))
        outcome = transaction.outcome()
        assert outcome is not None and outcome.loss is not None
        assert outcome.token_count == self.spec.tokens_per_step
        update = update_of(self.spec, step, outcome.gradient_norm)
        for name in self.plan.stage_holders():
            engine = self.peers[name].engine
            engine.work.end()
            for layer, state in engine.states.items():
                state.apply(engine.reduced[layer], *update)
        self.running, self.progress = {}, {}
        return outcome.loss

    async def until_quiet(self) -> None:
        """Wait until nobody can compute any more without the lost peer."""
        quiet, last = 0, dict(self.progress)
        async with asyncio.timeout(DEADLINE_S):
            while quiet < QUIET_POLLS:
                await asyncio.sleep(POLL_S)
                quiet, last = quiet + 1 if last == self.progress else 0, dict(self.progress)

    def replay(self, step: int, plan: Plan, lost: str | None) -> PartialReplay:
        parts = [
            contribution(name, self.states[name], step, progress)
            for name, progress in self.progress.items()
            if name != lost
        ]
        replay = replay_of(plan, Target(step, "base"), parts)
        assert replay is not None
        return replay

    def forwards(self, name: str, step: int) -> list[int]:
        """The microbatches whose forward a peer has computed in a step, in order."""
        recorder = self.recorders[name]
        recorder.end()
        (recorded,) = recorder.steps(step, 1)
        return [span.number for span in recorded.spans if span.kind == "forward"]


def contribution(
    name: str, states: dict[int, LayerState], step: int, progress: StageProgress | None
) -> Contribution:
    return Contribution(
        member=Member(name, 1),
        number=3,
        record=Signed(name, "", b"", b""),
        present=None,
        step=step,
        held=dict.fromkeys(states, step),
        joiners=(),
        pending=PendingStep(step, "base", (), (), progress),
    )


def with_instead(plan: Plan, lost: str, spare: str) -> Plan:
    """The plan in which a spare has the place of a lost stage-holder."""
    pipelines = tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(
                msgspec.structs.replace(stage, peer_id=spare) if stage.peer_id == lost else stage
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return msgspec.structs.replace(plan, pipelines=pipelines, spares=(lost,))


def with_stand_in(plan: Plan, lost: str) -> Plan:
    """The plan in which the replica in the second pipeline stands in for one of the first."""
    first, second = plan.pipelines
    stages = tuple(
        msgspec.structs.replace(stage, peer_id=replica.peer_id, stands_in=True)
        if stage.peer_id == lost
        else stage
        for stage, replica in zip(first.stages, second.stages, strict=True)
    )
    pipelines = (msgspec.structs.replace(first, stages=stages), second)
    return msgspec.structs.replace(plan, pipelines=pipelines, spares=())


def alone(plan: Plan, number: int, spec: RunSpec) -> Plan:
    """The plan in which one pipeline is left, with all microbatches."""
    pipeline = msgspec.structs.replace(
        plan.pipelines[number], first_microbatch=0, microbatch_count=spec.microbatches_per_step
    )
    gone = {s.peer_id for p in plan.pipelines if p != plan.pipelines[number] for s in p.stages}
    return Plan((pipeline,), tuple(sorted(gone)), 0)


async def lose(swarm: Swarm, step: int, lost: str, forwards: int) -> None:
    """Train until `lost` has done so many forwards; then it is gone, and all others stop."""
    swarm.start(step)
    await swarm.until_forwards(lost, forwards)
    await swarm.stop(lost)
    await swarm.until_quiet()
    for name in list(swarm.running):
        await swarm.stop(name)


def forwarded(progress: StageProgress | None) -> tuple[tuple[int, int], ...]:
    return () if progress is None else progress.forwarded


async def replace_one(swarm: Swarm, step: int, lost: str, forwards: int) -> None:
    """`lost` falls silent; a spare that has its layers takes its place and replays."""
    (spare,) = swarm.plan.spares
    await lose(swarm, step, lost, forwards)
    swarm.states[spare] = {
        layer: LayerState.from_bytes(swarm.spec, layer, swarm.states[lost][layer].to_bytes())
        for layer in swarm.plan.layers_of(lost)
    }
    plan = with_instead(swarm.plan, lost, spare)
    replay = swarm.replay(step, plan, lost)
    assert replay.kept_forwards > 0
    swarm.peers[spare].engine = None
    swarm.enter(step, plan, replay)
    swarm.start(step, replay)


async def scenario(
    folder: Path, spec: RunSpec, watch: Callable[[EnginePeer], None] = lambda peer: None
) -> list[float]:
    losses: list[float] = []
    async with engine_peers(5, folder, spec) as peers:
        for peer in peers:
            watch(peer)
        by_name = {peer.host.peer_id: peer for peer in peers}
        names = sorted(by_name)
        plan = even_plan(names[:4], (2, 2), spec)
        plan = msgspec.structs.replace(plan, spares=(names[4],))
        swarm = Swarm(by_name, spec, plan)
        for name in plan.stage_holders():
            swarm.states[name] = {n: LayerState.genesis(spec, n) for n in plan.layers_of(name)}
        swarm.enter(0, plan)
        places = [(0, 1), (1, 0), (0, 0), (1, 1)]
        for step, (pipeline, position) in enumerate(places):
            lost = swarm.plan.pipelines[pipeline].stages[position].peer_id
            count = swarm.plan.pipelines[pipeline].microbatch_count
            await replace_one(swarm, step, lost, 1 + (step * 2) % count)
            losses.append(await swarm.commit(step))
            for name in swarm.plan.stage_holders():
                computed = swarm.forwards(name, step)
                assert len(computed) == len(set(computed)) == count, (step, name, computed)
        for position in (0, 1):
            losses += await stood_in(swarm, len(losses), position)
        losses += await a_lost_frame_and_a_lost_pipeline(swarm, len(losses))
        assert not any(peer.faults for peer in peers), [peer.faults for peer in peers]
    return losses


async def stood_in(swarm: Swarm, step: int, position: int) -> list[float]:
    """A stage is lost, and a replica stands in. Meanwhile a frame is lost. One more step happens so
    before the plan is as it was."""
    before, losses = swarm.plan, []
    lost = before.pipelines[0].stages[position].peer_id
    survivor = before.pipelines[0].stages[1 - position].peer_id
    stand_in = before.pipelines[1].stages[position].peer_id
    swarm.enter(step, before)
    await lose(swarm, step, lost, 3)
    mended = with_stand_in(before, lost)
    replay = swarm.replay(step, mended, lost)
    begun = count_of(swarm.progress[survivor])
    assert replay.stage(mended, survivor).forwards == begun > 0, "nothing of the survivor is lost"
    swarm.enter(step, mended, replay)
    await lose_a_frame(swarm, step, replay, stand_in)
    replay = swarm.replay(step, mended, lost)
    assert replay.redone_forwards == 0, "nobody was lost"
    swarm.enter(step, mended, replay)
    swarm.start(step, replay)
    losses.append(await swarm.commit(step))
    computed = {name: swarm.forwards(name, step) for name in mended.stage_holders()}
    everything = list(range(swarm.spec.microbatches_per_step))
    both = computed.pop(stand_in)
    assert sorted(set(both)) == everything
    assert len(both) <= len(everything) + 1, "but for a forward of which it could tell nobody"
    assert sorted(n for numbers in computed.values() for n in numbers) == everything, computed
    swarm.start(step + 1)
    losses.append(await swarm.commit(step + 1))
    swarm.states[lost] = {
        layer: LayerState.from_bytes(swarm.spec, layer, swarm.states[stand_in][layer].to_bytes())
        for layer in before.layers_of(lost)
    }
    swarm.peers[lost].engine = None
    swarm.enter(step + 2, before)
    return losses


async def lose_a_frame(swarm: Swarm, step: int, replay: PartialReplay, stand_in: str) -> None:
    """The stand-in computes some of both pipelines' microbatches; then all stop."""
    swarm.start(step, replay)
    own = count_of(swarm.progress[stand_in]) + 3
    await swarm.until_forwards(stand_in, own)
    for name in list(swarm.running):
        await swarm.stop(name)


def count_of(progress: StageProgress | None) -> int:
    """The number of forwards."""
    return sum(count for _, count in forwarded(progress))


async def a_lost_frame_and_a_lost_pipeline(swarm: Swarm, step: int) -> list[float]:
    plan, losses = swarm.plan, []
    await lose(swarm, step, plan.pipelines[0].stages[1].peer_id, 2)
    replay = swarm.replay(step, plan, None)
    swarm.enter(step, plan, replay)
    swarm.start(step, replay)
    losses.append(await swarm.commit(step))
    for name in plan.stage_holders():
        computed = swarm.forwards(name, step)
        assert len(computed) == len(set(computed)), "nobody was lost: nothing is computed twice"
    assert replay.redone_forwards == 0 and replay.kept_forwards > 0
    step += 1
    swarm.enter(step, plan)
    await lose(swarm, step, plan.pipelines[0].stages[0].peer_id, 3)
    rest = alone(plan, 1, swarm.spec)
    replay = swarm.replay(step, rest, plan.pipelines[0].stages[0].peer_id)
    swarm.enter(step, rest, replay)
    swarm.start(step, replay)
    losses.append(await swarm.commit(step))
    for name in rest.stage_holders():
        assert sorted(swarm.forwards(name, step)) == list(range(swarm.spec.microbatches_per_step))
    swarm.start(step + 1)
    losses.append(await swarm.commit(step + 1))
    return losses


def test_what_survives_of_a_step_is_kept_and_the_loss_is_that_of_the_plain_loop(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    spec = run_spec(batch={"global_batch": 16, "microbatch": 1})
    losses = asyncio.run(scenario(tmp_path, spec))
    expected = list(ReferenceRun(spec, synthetic_batch(spec)).losses(len(losses)))
    assert len(losses) == 11
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < TOLERANCE
