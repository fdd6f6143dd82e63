"""Real daemons in virtual time: a guardian has died, and the next one fetches what it guards over a
thin line. Steps do not wait for it, and there is only one copy until it has all. Steps that were
told to be safe meanwhile were gone with their holder."""

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
from tests.testbed.begun import begun, participant_of
from tests.testbed.test_virtual_speed import view_of

SEED = 1
LONG_NS = 3_600_000_000_000
"""With steps of this length guardians keep up."""
THIN_BYTES_PER_S, WIDE_BYTES_PER_S = 50_000, 10_000_000


SHORT_NS = 1_000_000
"""With steps of this length guardians lag."""


def all_at(holder: str, step_ns: int = LONG_NS) -> Any:
    def plan(snapshot: Snapshot) -> Any:
        if (standing := standing_plan(snapshot)) is not None:
            return standing
        workload, here = snapshot.workload, sorted(it.peer_id for it in snapshot.records)
        one = holder if holder in here else here[0]
        stages = (Stage(one, 0, workload.layer_count, 1),)
        spares = tuple(it for it in here if it != one)
        return Plan((Pipeline(stages, 0, workload.microbatch_count),), spares, step_ns)

    return plan


def _steps_of(peer: Peer) -> list[tuple[int, int | None]]:
    """Its steps in their order: which step, and how many were safe by then."""
    return [(it["step"], it["safe_step"]) for it in peer.events() if it["event"] == "step"]


async def _three(swarm: Swarm, run: Path) -> tuple[Peer, Peer, Peer]:
    """The holder of all layers, their guardian, and a peer that does neither."""
    named = {peer.name: peer for peer in await begun(swarm, run, "abc")}
    holder = named["b"]
    await swarm.until(lambda: holder.step() >= 5, "steps", 60)
    view = view_of(holder)
    (guardian,) = (named[it] for it in "ac" if view.guarded_by(named[it].peer_id))
    (other,) = (named[it] for it in "ac" if named[it] is not guardian)
    return holder, guardian, other


def test_nothing_is_safe_before_its_guardian_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, 200, saves_every_steps=1000)

    async def scene(swarm: Swarm) -> None:
        monkeypatch.setattr(worlds, "compute_plan", all_at(swarm.identity_of("b").peer_id))
        holder, dying, guardian = await _three(swarm, run)
        before, two = view_of(holder), (holder, guardian)
        assert before.cut_pace is None, "guardians keep up"
        trainer = participant_of(holder).trainer
        await swarm.until(
            lambda: trainer.tell_safe_step() == holder.step() + 1, "all of it is safe", 5
        )

        def lines_carry(bytes_per_s: int) -> None:
            for one, other in ((holder, guardian), (guardian, holder)):
                swarm.network.links.of(one.peer_id, other.peer_id).bytes_per_s = bytes_per_s

        def missing() -> set[int]:
            follower = participant_of(guardian).trainer._followers.guardian
            return set(range(6)) if follower is None else follower.missing

        lines_carry(THIN_BYTES_PER_S)
        swarm.kill(dying)
        await swarm.until(lambda: all(view_of(it) is not before for it in two), "a view", 60)
        told = {peer.name: len(_steps_of(peer)) for peer in two}
        since = holder.step()
        await swarm.until(lambda: guardian.step() >= since + 2, "steps do not wait", 60)
        assert missing(), "it is still fetching"
        for peer in two:
            found = _steps_of(peer)[told[peer.name] + 1 :]  # one may have been told just then
            assert found and {safe for _, safe in found} == {None}, found
            assert participant_of(peer).trainer.tell_safe_step() is None
        lines_carry(WIDE_BYTES_PER_S)
        await swarm.until(lambda: not missing(), "the guardian has all", 60)
        last = holder.step()
        await swarm.until(lambda: guardian.step() >= last + 3, "steps", 60)
        safe = {peer.name: max(it for _, it in _steps_of(peer) if it) for peer in two}
        assert min(safe.values()) >= last + 2, safe
        swarm.kill(holder)
        count = len(_steps_of(guardian))
        await swarm.until(lambda: len(_steps_of(guardian)) > count + 2, "it goes on", 60)
        assert min(step for step, _ in _steps_of(guardian)[count:]) >= max(safe.values())

    play(SEED, tmp_path / "world", scene)


def test_a_cut_whose_guardian_has_died_is_not_safe_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 800050: two peers died one after the other. What the second alone had was told to be
    safe after the first had gone."""
    run = make_run(tmp_path, 400, saves_every_steps=1000)

    async def scene(swarm: Swarm) -> None:
        plan = all_at(swarm.identity_of("b").peer_id, SHORT_NS)
        monkeypatch.setattr(worlds, "compute_plan", plan)
        holder, dying, guardian = await _three(swarm, run)
        before, two = view_of(holder), (holder, guardian)
        assert before.cut_pace is not None, "guardians lag"
        for peer in two:
            trainer = participant_of(peer).trainer
            await swarm.until(lambda it=trainer: it.tell_safe_step() is not None, "a whole cut", 60)
        swarm.network.links.of(holder.peer_id, guardian.peer_id).bytes_per_s = THIN_BYTES_PER_S
        swarm.kill(dying)
        await swarm.until(lambda: all(view_of(it) is not before for it in two), "a view", 60)
        told = {peer.name: len(_steps_of(peer)) for peer in two}
        since = holder.step()
        await swarm.until(lambda: guardian.step() >= since + 2, "steps", 60)
        for peer in two:
            found = _steps_of(peer)[told[peer.name] + 1 :]
            assert found and {safe for _, safe in found} == {None}, found
        swarm.network.links.of(holder.peer_id, guardian.peer_id).bytes_per_s = WIDE_BYTES_PER_S
        trainer = participant_of(guardian).trainer
        await swarm.until(lambda: trainer.tell_safe_step() is not None, "the next cut", 60)
        safe = trainer.tell_safe_step()
        swarm.kill(holder)
        count = len(_steps_of(guardian))
        await swarm.until(lambda: len(_steps_of(guardian)) > count + 2, "it goes on", 60)
        assert min(step for step, _ in _steps_of(guardian)[count:]) >= safe

    play(SEED, tmp_path / "world", scene)
