"""Real daemons in virtual time: layers get another holder, and the former holder gives the guardian
false gradients behind a right state. The guarded state never was the new holder's, and nobody saw
it: once that holder died it was the state of all."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.planner.planner import standing_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun
from tests.testbed.test_virtual_followed_states import (
    digests_of,
    has_stage,
    losses_of,
    versions_of,
)
from tests.testbed.test_virtual_speed import view_of

STEPS = 60
SEED = 1
LONG_NS = 3_600_000_000_000
"""With steps of this length guardians keep up."""


def _first_two_then_one(two: list[str], one: str) -> Any:
    """The whole model is at both of `two`, and at `one` once a fifth member is there."""

    def plan(snapshot: Snapshot) -> Any:
        if (standing := standing_plan(snapshot)) is not None:
            return standing
        here = sorted(record.peer_id for record in snapshot.records)
        holders = two if len(here) < 5 else [one]
        each, layers = snapshot.workload.microbatch_count // len(holders), snapshot.workload
        pipelines = (
            Pipeline((Stage(it, 0, layers.layer_count, 1),), n * each, each)
            for n, it in enumerate(holders)
        )
        spares = tuple(it for it in here if it not in holders)
        return Plan(tuple(pipelines), spares, LONG_NS)

    return plan


def _false_gradients(patches: Patches, lying: Lying, guardian: str) -> None:
    async def send(self: Any, peer_id: str, view: Any, step: int, layer: int, values: Any) -> None:
        if lying.kind() == "to guard" and peer_id == guardian:
            lying.tell()
            values = 2 * values
        await honest(self, peer_id, view, step, layer, values)

    honest = patches.put(Donor, "_send_gradient", send)


def test_what_is_guarded_is_what_its_holder_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, STEPS, saves_every_steps=1000)

    async def scene(swarm: Swarm) -> None:
        ids = {name: swarm.identity_of(name).peer_id for name in "abcd"}
        guards, old, new, liar = "abcd"
        plan = _first_two_then_one([ids[liar], ids[old]], ids[new])
        monkeypatch.setattr(worlds, "compute_plan", plan)
        lying = Lying({liar: ids[liar]}, together=False)
        lying.kinds, patches = {liar: "to guard"}, Patches()
        with put_in(lying):
            _false_gradients(patches, lying, ids[guards])
            try:
                await _scene(swarm, lying, guards, new)
            finally:
                patches.undo()

    async def _scene(swarm: Swarm, lying: Lying, guards: str, new: str) -> None:
        peers = await begun(swarm, run, "abcd")
        named: dict[str, Peer] = {peer.name: peer for peer in peers}
        holder, guardian = named[new], named[guards]
        await swarm.until(lambda: peers[0].step() >= 3, "steps", 60)
        swarm.start(swarm.peer("e", initial_peers=(swarm.address(peers[0]),)))
        await swarm.until(lambda: has_stage(holder, holder), "the layers have moved", 120)
        assert lying.count, "its guardian was given false gradients"
        view, since = view_of(holder), holder.step()
        assert view.cut_pace is None and set(view.guards.values()) == {guardian.peer_id}
        await swarm.until(lambda: holder.step() >= since + 3, "steps", 60)
        pair = (holder, guardian)
        await swarm.until(lambda: len({*map(versions_of, pair)}) == 1, "both are as far", 60)
        assert digests_of(guardian) == digests_of(holder), "bit for bit"
        swarm.kill(holder)
        last = guardian.step()
        await swarm.until(lambda: guardian.step() >= last + 5, "steps go on from it", 60)
        assert losses_of(guardian).keys() >= {last + 3}

    play(SEED, tmp_path / "world", scene)
