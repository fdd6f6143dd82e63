"""A stage is stopped after a forward of which it could tell nobody, and the stage before is lost.
The peer that takes the lost place gets that microbatch's gradient before it has computed its
forward again. Nothing that was said let it expect that gradient. The sender is right all the
same."""

import asyncio
from pathlib import Path

import msgspec

from p2p_dtfm.core.messages.stage_progress import StageProgress
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec
from tests.e2e.swarm_in_process import engine_peers
from tests.e2e.test_parity import TOLERANCE, even_plan, synthetic_batch
from tests.e2e.test_partial_replay import Swarm, count_of, with_instead

SAID = 2
"""Forwards of the last stage that it tells of. It computes one more."""


class LastWordLost(Swarm):
    survivor = ""

    def told(self, name: str, progress: StageProgress | None) -> None:
        if name == self.survivor and count_of(progress) > SAID:
            self.running[name].cancel()
        else:
            super().told(name, progress)


async def scenario(folder: Path, spec: RunSpec) -> float:
    async with engine_peers(3, folder, spec) as peers:
        by_name = {peer.host.peer_id: peer for peer in peers}
        lost, survivor, spare = sorted(by_name)
        plan = even_plan([lost, survivor], (2,), spec)
        swarm = LastWordLost(by_name, spec, msgspec.structs.replace(plan, spares=(spare,)))
        swarm.survivor = survivor
        for name in plan.stage_holders():
            swarm.states[name] = {n: LayerState.genesis(spec, n) for n in plan.layers_of(name)}
        swarm.enter(0, plan)
        swarm.start(0)
        await asyncio.wait([swarm.running[survivor]])
        assert count_of(swarm.progress[survivor]) == SAID
        assert len(by_name[survivor].engine.work.forwarded) == SAID + 1
        del swarm.running[survivor]
        await swarm.stop(lost)
        swarm.survivor = ""
        swarm.states[spare] = {
            layer: LayerState.from_bytes(spec, layer, state.to_bytes())
            for layer, state in swarm.states[lost].items()
        }
        instead = with_instead(plan, lost, spare)
        replay = swarm.replay(0, instead, lost)
        swarm.enter(0, instead, replay)
        swarm.start(0, replay)
        loss = await swarm.commit(0)
        assert not any(peer.faults for peer in peers), [peer.faults for peer in peers]
        return loss


def test_its_gradient_is_taken_and_nobody_is_blamed(tmp_path: Path) -> None:
    spec = run_spec(batch={"global_batch": 8, "microbatch": 1})
    loss = asyncio.run(scenario(tmp_path, spec))
    (expected,) = ReferenceRun(spec, synthetic_batch(spec)).losses(1)
    assert abs(loss - expected) < TOLERANCE
