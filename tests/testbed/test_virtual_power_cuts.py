"""Real daemons in virtual time: all have ended, and one comes back with an older disk."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.beginning import SMALL_GIB
from p2p_dtfm.testbed.virtual.seeds.judge import saved_at
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.checkpoint import complete

SAVES_EVERY_STEPS = 5
AHEAD_STEPS = 60
"""Far more steps than the other peer takes before it hears of it."""


@pytest.mark.parametrize("trains_already", [False, True], ids=["waits", "trains"])
def test_the_one_with_the_older_disk_throws_the_other_one_back_by_nothing(
    tmp_path: Path, trains_already: bool
) -> None:
    run = make_run(tmp_path, steps=400, saves_every_steps=SAVES_EVERY_STEPS)

    async def scene(swarm: Swarm) -> None:
        older, newer, at_step = await one_goes_on(swarm, run)
        seen = len(views(newer))
        swarm.start(older, expect_peers=1)
        await swarm.until(lambda: "waits 15 s at most" in older.standing(), "it waits", 30)
        if trains_already:
            await swarm.until(lambda: not older.standing().startswith("waiting"), "alone", 30)
        swarm.start(newer)
        await swarm.until(lambda: len(members(newer)) == 2 == len(members(older)), "one swarm", 60)
        went_on = views(newer)[seen]["step"]
        assert went_on > at_step - 2 * SAVES_EVERY_STEPS, "from the newest checkpoint of both"
        assert views(newer)[-1]["step"] >= went_on == min(it["step"] for it in views(newer)[seen:])

    play(1, tmp_path / "world", scene)


def test_who_has_a_damaged_checkpoint_goes_on_with_the_others_from_the_one_before(
    tmp_path: Path,
) -> None:
    """The newest checkpoint is as long as it was. The peer founds nothing, so nobody looks at the
    file before all go on from there: the daemon ended, at each start."""
    run = make_run(tmp_path, steps=400, saves_every_steps=SAVES_EVERY_STEPS)

    async def scene(swarm: Swarm) -> None:
        older, newer, _ = await one_goes_on(swarm, run)
        seen = len(views(newer))
        newest = max(newer.home.glob("runs/*/checkpoints/step-*"))
        for path in newest.glob("layer-000[12]*"):
            path.write_bytes(bytes(path.stat().st_size))
        swarm.start(older, expect_peers=1)
        await swarm.until(lambda: "waits 15 s at most" in older.standing(), "it waits", 30)
        swarm.start(newer)
        damaged = int(newest.name.removeprefix("step-"))
        await swarm.until(lambda: older.step() > damaged, "steps of both", 90)
        assert newer.is_running and len(members(newer)) == 2 == len(members(older))
        went_on = [event["step"] for event in views(newer)[seen:]]
        assert went_on[0] == damaged and damaged - SAVES_EVERY_STEPS in went_on

    play(1, tmp_path / "world", scene)


def test_what_the_last_step_left_with_a_lost_disk_is_saved_from_memory(tmp_path: Path) -> None:
    """Seed 501889: the only peer that had written some layers of the last step loses power, and its
    disk had lied. Others have those layers in memory by then, and no later step saves them."""
    steps = 12
    run = make_run(tmp_path, steps, SAVES_EVERY_STEPS)

    async def scene(swarm: Swarm) -> None:
        swarm.memory_gib, swarm.network.links.are_near = SMALL_GIB, True
        first = swarm.peer("a", run=str(run), expect_peers=4)
        swarm.start(first)
        await swarm.until(lambda: first.has_run, "the run is founded", 60)
        for name in "bcd":
            swarm.start(swarm.peer(name, initial_peers=(swarm.address(first),)))
        await swarm.until(lambda: first.step() >= SAVES_EVERY_STEPS, "steps of four", 60)
        assert first.daemon is not None and first.daemon.status_api is not None
        plan: Any = first.daemon.status_api.plan_json()["plan"]
        last_stages = {pipeline["stages"][-1]["peer_id"] for pipeline in plan["pipelines"]}
        lost = next(peer for peer in swarm.peers[1:] if peer.peer_id in last_stages)
        lost.disk.lies = True
        while any(peer.step() < steps - 1 for peer in swarm.peers):
            await asyncio.sleep(0.001)  # what is made of the last step is evaluated, and told
        swarm.cut_power(lost)
        rest = [peer for peer in swarm.peers if peer is not lost]
        await swarm.until(lambda: not any(peer.is_running for peer in rest), "all end", 120)
        assert all(complete(it.directory) for peer in rest for it in saved_at(peer, steps))
        assert any(saved_at(peer, steps) for peer in rest)

    play(1, tmp_path / "world", scene)


async def one_goes_on(swarm: Swarm, run: Path) -> tuple[Peer, Peer, int]:
    """Of two peers one dies, and the other some steps later, at the given step at the earliest."""
    older = swarm.peer("older", run=str(run), expect_peers=2)
    newer = swarm.peer("newer", initial_peers=(swarm.address(older),))
    swarm.start(older)
    await swarm.until(lambda: older.has_run, "the run is founded", 60)
    swarm.start(newer)
    await swarm.until(lambda: min(older.step(), newer.step()) >= 10, "steps of two", 120)
    swarm.kill(older)
    at_step = newer.step() + AHEAD_STEPS
    await swarm.until(lambda: newer.step() >= at_step, "one goes on alone", 120)
    swarm.kill(newer)
    return older, newer, at_step


def views(peer: Peer) -> list[dict[str, int]]:
    return [event for event in peer.events() if event["event"] == "view"]


def members(peer: Peer) -> list[str]:
    return peer.daemon.status_json().get("members", []) if peer.daemon is not None else []
