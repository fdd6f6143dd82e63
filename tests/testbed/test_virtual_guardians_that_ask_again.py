"""Real daemons in virtual time: in each step a guardian asks its holder for what it has already,
and gives no receipt. The holder waited for the guardian, and told nobody so. The others took the
holder for a peer that stands still, and went on without it."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.planner.planner import standing_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.daemon.peers.wire import FollowLayers, LayerReceipt
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun
from tests.testbed.test_virtual_speed import view_of

STEPS = 400
SEED = 1
STEP_NS = 600_000_000
"""Guardians keep up, as planned."""


def two_stages_and_a_spare(snapshot: Snapshot) -> Any:
    if (standing := standing_plan(snapshot)) is not None:
        return standing
    first, *others = sorted(record.peer_id for record in snapshot.records)
    count, spares = snapshot.workload.layer_count, others[1:]
    stages = [Stage(first, 0, count, 1)]
    if others:
        stages = [Stage(first, 0, count // 2, 1), Stage(others[0], count // 2, count, 1)]
    pipeline = Pipeline(tuple(stages), 0, snapshot.workload.microbatch_count)
    return Plan((pipeline,), tuple(spares), STEP_NS)


def asks_again(guardian: Peer, holder: Peer) -> None:
    """From now on the guardian asks again, in place of each receipt for this holder."""
    assert guardian.daemon is not None and guardian.daemon.status_api is not None
    participant = guardian.daemon.status_api.participant
    assert participant is not None
    messenger, states = participant.network.messenger, participant.trainer.states
    tell, numbers = messenger.tell, iter(range(10**6, 10**9))

    def instead(peer_id: str, message: Any) -> None:
        if isinstance(message, LayerReceipt) and peer_id == holder.peer_id:
            layers = {layer: states[layer].version for layer in message.layers}
            message = FollowLayers(message.view, next(numbers), layers, True)
        tell(peer_id, message)

    messenger.tell = instead  # type: ignore[method-assign]


def test_the_holder_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "compute_plan", two_stages_and_a_spare)
    run = make_run(tmp_path, STEPS, saves_every_steps=1000)

    async def scene(swarm: Swarm) -> None:
        peers = await begun(swarm, run, "abc")
        await swarm.until(lambda: min(it.step() for it in peers) >= 50, "steps", 120)
        view = view_of(peers[0])
        assert view.cut_pace is None, "guardians keep up"
        guards = view.guards
        (spare,) = (it for it in peers if not view.layers_of(it.peer_id))
        assert spare.peer_id in guards.values()
        others = [it for it in peers if it is not spare]
        asks_again(spare, others[0])
        begins = peers[0].step()
        await swarm.until(lambda: min(it.step() for it in others) >= begins + 20, "steps", 120)
        for peer in others:
            assert {it.peer_id for it in others} <= set(view_of(peer).member_ids)

    play(SEED, tmp_path / "world", scene)
