"""Real daemons in virtual time: a donor gives a newcomer states that are never those of the step at
which all wait for it.

Of a step to which nobody has come the others say nothing, so the donor's word stood alone, and was
taken. Of a state that is not moved on nothing seemed to be missing. The newcomer said that it was
ready, waited for ever in the first step of its place, and was out for it, each time that it came.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.layer_state import LayerState
from tests.testbed.begun import begun
from tests.testbed.test_virtual_followed_states import digests_of, has_stage, replicas, versions_of

STEPS = 60
AHEAD = 1000
LIAR = "b"


def gives_states_ahead(patch: pytest.MonkeyPatch, lying: Lying) -> None:
    honest = Donor._offer

    async def offer(self: Any, key: Any, subscription: Any, state: LayerState) -> bool:
        if lying.here() == LIAR:
            lying.tell()
            state = LayerState.from_bytes(state.spec, state.layer, state.to_bytes())
            state.version += AHEAD
        return await honest(self, key, subscription, state)

    patch.setattr(Donor, "_offer", offer)


def keeps_steps_back(patch: pytest.MonkeyPatch, lying: Lying) -> None:
    reduced, committed = Donor.reduced, Donor.committed

    def without_gradients(self: Any, *said: Any, **how: Any) -> None:
        if lying.here() != LIAR:
            reduced(self, *said, **how)

    def without_commits(self: Any, outcome: Any) -> None:
        if lying.here() == LIAR:
            lying.tell()
            self._forget_step()
        else:
            committed(self, outcome)

    patch.setattr(Donor, "reduced", without_gradients)
    patch.setattr(Donor, "committed", without_commits)


@pytest.mark.parametrize("lies", [gives_states_ahead, keeps_steps_back])
def test_who_is_given_states_of_another_step_asks_others_and_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: Any
) -> None:
    monkeypatch.setattr(worlds, "compute_plan", replicas)
    run = make_run(tmp_path, STEPS, saves_every_steps=1000)
    spec = json.loads(run.read_text())
    spec["batch"]["global_batch"] = 16
    run.write_text(json.dumps(spec))

    async def scene(swarm: Swarm) -> None:
        lying = Lying({LIAR: swarm.identity_of(LIAR).peer_id}, together=False)
        lies(monkeypatch, lying)
        peers = await begun(swarm, run, "abcd")
        await swarm.until(lambda: peers[0].step() >= 3, "steps", 60)
        newcomer = swarm.peer("e", initial_peers=(swarm.address(peers[0]),))
        swarm.start(newcomer)
        await swarm.until(lambda: has_stage(peers[0], newcomer), "it has a stage", 120)
        since = peers[0].step()
        await swarm.until(lambda: newcomer.step() >= since + 5, "steps with it", 15)
        assert lying.has_told, "it was given such states"
        assert has_stage(peers[0], newcomer)
        pair = (peers[0], newcomer)
        await swarm.until(lambda: len({*map(versions_of, pair)}) == 1, "both are as far", 60)
        assert digests_of(newcomer) == digests_of(peers[0]), "bit for bit what the others have"

    play(1, tmp_path / "world", scene)
