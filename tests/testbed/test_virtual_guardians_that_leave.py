"""Real daemons in virtual time: a lagging guardian leaves. The layers' only holder dies before its
new guardian has got a copy beside training. The new guardian waited a minute for the dead holder,
and then began at the first step."""

import logging
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.planner.planner import standing_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun
from tests.testbed.test_virtual_speed import view_of

STEPS = 200
SEED = 1


def one_holds_all(snapshot: Snapshot) -> Any:
    """The first peer in order holds all layers, and the others are spares."""
    if (standing := standing_plan(snapshot)) is not None:
        return standing
    holder, *spares = sorted(record.peer_id for record in snapshot.records)
    stage = Stage(holder, 0, snapshot.workload.layer_count, 1)
    pipeline = Pipeline((stage,), 0, snapshot.workload.microbatch_count)
    return Plan((pipeline,), tuple(spares), 1_000_000)


async def leaves_and_then_one_dies(
    swarm: Swarm, guardian: Peer, one: Peer, other: Peer
) -> tuple[int, int]:
    """The guardian of `one` and `other`, between whom all is slow, leaves; then `one` dies. Returns
    the step of `other` when the guardian had left, and the step with which it went on alone."""
    for here, there in ((one, other), (other, one)):
        swarm.network.links.of(here.peer_id, there.peer_id).is_slow = True
    swarm.leave(guardian)
    await swarm.until(lambda: len(view_of(other).members) == 2, "it has left", 60)
    begins = other.step()
    await swarm.until(lambda: other.step() > begins, "a step commits without it", 60)
    swarm.kill(one)
    last = other.step()
    await swarm.until(lambda: other.step() > last + 2, "the other goes on at once", 30)
    (*_, again) = (event["step"] for event in other.events() if event["event"] == "view")
    return begins, again


def test_the_holder_dies_as_soon_as_its_guardian_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "compute_plan", one_holds_all)
    run = make_run(tmp_path, STEPS, saves_every_steps=1000)

    async def scene(swarm: Swarm) -> None:
        peers = await begun(swarm, run, "abc")
        await swarm.until(lambda: peers[0].step() >= 30, "steps", 120)
        view = view_of(peers[0])
        (guardian,) = set(view.guards.values())
        named = {peer.peer_id: peer for peer in peers}
        (holder,) = (peer for peer in peers if view.layers_of(peer.peer_id))
        other = next(peer for peer in peers if peer.peer_id not in (guardian, holder.peer_id))
        assert view.cut_pace is not None, "it lags"
        # so that a copy takes its time
        begins, again = await leaves_and_then_one_dies(swarm, named[guardian], holder, other)
        assert again >= begins, "its first cut was whole when the guardian left"

    play(SEED, tmp_path / "world", scene)


def two_hold_halves(snapshot: Snapshot) -> Any:
    """The first two peers in order hold a half each, and the others are spares."""
    if (standing := standing_plan(snapshot)) is not None:
        return standing
    here = sorted(record.peer_id for record in snapshot.records)
    count = snapshot.workload.layer_count
    ends = (0, count // 2, count) if len(here) > 1 else (0, count)
    stages = tuple(
        Stage(peer_id, first, end, 1)
        for peer_id, first, end in zip(here, ends, ends[1:], strict=False)
    )
    pipeline = Pipeline(stages, 0, snapshot.workload.microbatch_count)
    return Plan((pipeline,), tuple(here[len(stages) :]), 1_000_000)


def test_two_that_hold_halves_keep_what_they_fetched_to_guard_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each asked the others about its copies one step before these were as of the others' step.
    They did not match, and were thrown away."""
    monkeypatch.setattr(worlds, "compute_plan", two_hold_halves)
    run = make_run(tmp_path, STEPS, saves_every_steps=1000)

    async def scene(swarm: Swarm) -> None:
        peers = await begun(swarm, run, "abc")
        await swarm.until(lambda: peers[0].step() >= 30, "steps", 120)
        view = view_of(peers[0])
        (guardian,) = (peer for peer in peers if not view.layers_of(peer.peer_id))
        one, other = (peer for peer in peers if peer is not guardian)
        assert view.cut_pace is not None, "it lags"
        # so that the last gradient comes late
        begins, again = await leaves_and_then_one_dies(swarm, guardian, one, other)
        assert again >= begins, "what it guards was here when the guardian left"

    with caplog.at_level(logging.WARNING, "p2p_dtfm"):
        play(SEED, tmp_path / "world", scene)
    assert not [it for it in caplog.messages if "not what others have" in it], "nobody lies"
