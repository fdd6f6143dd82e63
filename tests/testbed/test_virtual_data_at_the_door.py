"""Real daemons in virtual time: the only peer with the data comes back, and asks to be let in by a
member that waits for these data, and has never heard of the peer. The peer was to be let in after
the step under way, and that step waited for its data."""

from pathlib import Path

import pytest

from p2p_dtfm.daemon.node.background import data_copies
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import are_in_views_of, begun, participant_of

SEED = 1
STEPS = 400
MISSING = "data shard"
THIN_BYTES_PER_S, WIDE_BYTES_PER_S = 5_000, 10_000_000


def test_who_waits_at_the_door_is_asked_for_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_copies, "DATA_KEPT_LIMIT_BYTES", 1)  # large ones are not copied
    run = make_run(tmp_path, STEPS, saves_every_steps=1000)

    async def scene(swarm: Swarm) -> None:
        founder, other = await begun(swarm, run, "ab")
        await swarm.until(lambda: other.has_run, "it takes part", 60)
        swarm.network.links.of(founder.peer_id, other.peer_id).bytes_per_s = THIN_BYTES_PER_S
        await swarm.until(lambda: any(it["event"] == "view" for it in other.events()), "a view", 60)
        swarm.kill(founder)
        await swarm.until(lambda: MISSING in other.standing(), "it lacks data", 60)
        await swarm.until(are_in_views_of([other], 1), "it is alone", 60)
        participant_of(other).network.messenger.forget(founder.peer_id)  # as after a power cut
        swarm.network.links.of(founder.peer_id, other.peer_id).bytes_per_s = WIDE_BYTES_PER_S
        last = other.step()
        swarm.start(founder, run=None, initial_peers=(swarm.address(other),))
        await swarm.until(lambda: other.step() > last + 2, "steps go on", 60)
        await swarm.until(lambda: founder.has_run, "it takes part", 60)
        await swarm.until(are_in_views_of([founder, other], 2), "it is let in", 60)

    play(SEED, tmp_path / "world", scene)
