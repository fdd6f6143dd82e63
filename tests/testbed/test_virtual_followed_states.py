"""Real daemons in virtual time: a donor gives a newcomer a right state, which the others confirm,
and then other gradients than they get. The newcomer began with parameters of its own. It was
convicted of all that it computed from them, and barred."""

import json
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.planner.planner import standing_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.layer_state import LayerState
from tests.testbed.begun import begun, participant_of
from tests.testbed.test_virtual_speed import view_of

FOLLOW_STEPS = 5
STEPS = 60
SEED = 1


def replicas(snapshot: Snapshot) -> Any:
    """Replicas of the whole model, as many as there are members."""
    if (standing := standing_plan(snapshot)) is not None:
        return standing
    here = sorted(record.peer_id for record in snapshot.records)
    total, layers = snapshot.workload.microbatch_count, snapshot.workload.layer_count
    ends = [total * number // len(here) for number in range(len(here) + 1)]
    pipelines = (
        Pipeline((Stage(peer_id, 0, layers, 1),), ends[n], ends[n + 1] - ends[n])
        for n, peer_id in enumerate(here)
    )
    return Plan(tuple(pipelines), (), 1_000_000)


def by_slow_lines(swarm: Swarm, newcomer: Peer, peers: list[Peer]) -> None:
    """Make the lines slow, so that steps go on while the newcomer's states come."""
    for peer in peers:
        for here, there in ((peer, newcomer), (newcomer, peer)):
            swarm.network.links.of(here.peer_id, there.peer_id).is_slow = True


def has_stage(one: Peer, other: Peer) -> bool:
    """Whether `other` has a stage, as `one` sees it."""
    plan = view_of(one).plan
    return isinstance(plan, Plan) and other.peer_id in plan.stage_holders()


def losses_of(peer: Peer) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in peer.events() if event["event"] == "step"}


def states_of(peer: Peer) -> dict[int, LayerState]:
    return participant_of(peer).trainer.states


def versions_of(peer: Peer) -> tuple[int, ...]:
    return tuple(state.version for _, state in sorted(states_of(peer).items()))


def digests_of(peer: Peer) -> list[str]:
    return [state.digest() for _, state in sorted(states_of(peer).items())]


@pytest.mark.parametrize("is_audited", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_newcomer_that_was_given_false_gradients_asks_anew_and_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_audited: bool
) -> None:
    monkeypatch.setattr(worlds, "compute_plan", replicas)
    run = make_run(tmp_path, STEPS, saves_every_steps=1000)
    spec = json.loads(run.read_text())
    spec["batch"]["global_batch"] = 16
    run.write_text(json.dumps(spec))
    run = with_audits(run, 0.02, FOLLOW_STEPS) if is_audited else run

    async def scene(swarm: Swarm) -> None:
        lying = Lying({"b": swarm.identity_of("b").peer_id}, together=False)
        lying.kinds = {"b": "followed"}
        with put_in(lying):
            peers = await begun(swarm, run, "abcd")
            await swarm.until(lambda: peers[0].step() >= 3, "steps", 60)
            newcomer = swarm.peer("e", initial_peers=(swarm.address(peers[0]),))
            swarm.start(newcomer)
            if is_audited:  # who is new has no stage yet
                await swarm.until(lambda: len(view_of(peers[0]).members) == 5, "it is in", 60)
            else:  # to measure slow lines takes as long as the run
                await swarm.until(lambda: "to be let in" in newcomer.standing(), "it asks", 60)
            by_slow_lines(swarm, newcomer, peers)
            await swarm.until(lambda: has_stage(peers[0], newcomer), "it has a stage", 120)
            assert lying.count, "it was given false gradients"
            since = peers[0].step()
            await swarm.until(lambda: newcomer.step() >= since + 5, "steps with it", 60)
            assert has_stage(peers[0], newcomer) and not lying.reports, lying.reports
            theirs, own = losses_of(peers[0]), losses_of(newcomer)
            assert all(theirs.get(step, loss) == loss for step, loss in own.items())
            pair = (peers[0], newcomer)
            await swarm.until(lambda: len({*map(versions_of, pair)}) == 1, "both are as far", 60)
            assert digests_of(newcomer) == digests_of(peers[0]), "bit for bit what the others have"
            assert peers[0].daemon is not None and not peers[0].daemon.status_json().get("barred")

    play(SEED, tmp_path / "world", scene)
