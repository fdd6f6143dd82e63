"""Real daemons in virtual time: a stage-holder does all its work and never says that it is ready
for the next view. A peer that asks to join is let in all the same."""

from pathlib import Path

import pytest

from p2p_dtfm.core.liveness import vouches
from p2p_dtfm.core.liveness.pace import SECOND_NS
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun

NAMES, LIAR, NEWCOMER = "abcd", "d", "e"
WITHIN_S = 30.0


def has_stage(peer: Peer) -> bool:
    return bool(peer.daemon is not None and peer.daemon.status_json().get("layers"))


@pytest.mark.nightly
def test_who_is_never_ready_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Participant.vouch

    def vouch(self: Participant) -> ViewId | None:
        process = PROCESS.get()
        return None if process is not None and process.peer_name == LIAR else honest(self)

    monkeypatch.setattr(Participant, "vouch", vouch)
    monkeypatch.setattr(vouches, "PATIENCE_NS", 4 * SECOND_NS)  # so that fewer steps are played
    run = make_run(tmp_path, 2000, saves_every_steps=2000)

    async def scene(swarm: Swarm) -> None:
        first, *_ = await begun(swarm, run, NAMES)
        await swarm.until(lambda: first.step() >= 5, "steps", 60)
        newcomer = swarm.peer(NEWCOMER, initial_peers=(swarm.address(first),))
        swarm.start(newcomer)
        await swarm.until(lambda: has_stage(newcomer), "the newcomer has a stage", WITHIN_S)
        step = first.step()
        await swarm.until(lambda: first.step() >= step + 5, "more steps", 60)

    play(1, tmp_path / "world", scene)
