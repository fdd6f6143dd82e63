"""Scenes for bugs about who comes, who goes and who is believed, which no tried seed had found.
Each is green on the daemon as it is, and red with the bug. `test_virtual_scenes.py` plays them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.consensus.parts.syncing import Syncing
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import Snapshot, ViewId
from p2p_dtfm.core.recovery import view as views
from p2p_dtfm.daemon.node.coming_and_going import departure
from p2p_dtfm.daemon.peers.run_source import shows_end
from p2p_dtfm.testbed.virtual import swarm as swarms
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.saved import checkpoint_roots, is_whole
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.checkpoint import layer_path, list_checkpoints
from tests.sim.test_colluders_that_accuse import WATCHED_NS, Colluders
from tests.testbed.begun import agreement_of, are_in_views_of, begun, participant_of
from tests.testbed.late import Late
from tests.testbed.test_virtual_followed_states import replicas
from tests.testbed.test_virtual_founders import SLOW
from tests.testbed.test_virtual_safe_steps import LONG_NS

SEED = 1
LOOK_S = 7.5
"""After so long, a founder that waits has looked for a view once in vain. It looks again when it
has founded."""
LATE_S = 3.0
"""Others agree without that word, and the member that lacks it hears of the view half a second
later."""
FOUNDS_S = 20.0
"""By then the founder has founded, and the others have not come."""
DAY_S = 86_400.0
WAITS_S = 60.0
LAST = 12
"""The step in which nothing is trained any more."""


def a_clock_is_put_right(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """One life begins by a clock that is a day ahead, and the next by a right one."""
    run = make_run(folder, 2000)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await begun(swarm, run, "abc")
        await swarm.until(lambda: c.step() >= 10, "steps", 60)
        for ahead_s in (DAY_S, 0.0):
            swarm.kill(c)
            swarm.set_clock(c, ahead_s)
            await swarm.until(are_in_views_of([a, b], 2), "they go on", 30)
            swarm.start(c)
            await swarm.until(are_in_views_of([a, b], 3), "it is let in", 30)

    play(SEED, folder / "world", scene)


def a_founder_is_left_by_the_newcomer_that_it_founds_with(
    folder: Path, patches: pytest.MonkeyPatch
) -> None:
    """A founder comes back to nobody, and a newcomer asks it to be let in. The newcomer is let in
    elsewhere before the founder has waited for all its former fellows. When those have died the
    founder founds anew."""
    patches.setattr(swarms, "FLOPS_PER_S", SLOW)
    run = make_run(folder, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await begun(swarm, run, "abc")
        await swarm.until(lambda: a.step() >= 20, "steps", 120)
        swarm.kill(a)
        swarm.kill(b)
        swarm.cut(a, c)
        swarm.cut(b, c)
        await swarm.until(are_in_views_of([c], 1), "one goes on", 60)
        swarm.start(a, expect_peers=1)
        await swarm.until(lambda: "waits 15 s" in a.standing(), "it waits", 60)
        await asyncio.sleep(LOOK_S)
        swarm.mend(b, c)
        swarm.start(b)
        await swarm.until(lambda: b.peer_id in _joiners_of(a), "the other asks it", 10)
        await swarm.until(are_in_views_of([c], 2), "that one is let in elsewhere", 14)
        await asyncio.sleep(FOUNDS_S)
        assert agreement_of(a).view is None, "its founding has come to nothing"
        assert participant_of(a).membership.founds
        swarm.kill(b)
        swarm.kill(c)
        swarm.mend(a, c)
        swarm.start(b)
        swarm.start(c)
        await swarm.until(are_in_views_of([a], 3), "it founds", 180)

    play(SEED, folder / "world", scene)


def two_that_wait_for_a_plan_hear_nothing_else(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """They hear only that the other one lives, and stay together until one is cut off."""
    run = make_run(folder, 40)

    async def scene(swarm: Swarm) -> None:
        patches.setattr(worlds, "compute_plan", lambda *_: NoPlan("nobody has room"))
        a, b = await begun(swarm, run, "ab")
        await swarm.until(lambda: b.is_in_a_view, "a view", 60)
        view = a.view_id
        await asyncio.sleep(WAITS_S)
        assert a.view_id == b.view_id == view, "they stay in it"
        swarm.cut(a, b)
        await swarm.until(are_in_views_of([a], 1), "who is gone is missed", 30)

    play(SEED, folder / "world", scene)


def a_saved_layer_is_damaged_while_its_daemon_is_away(
    folder: Path, patches: pytest.MonkeyPatch
) -> None:
    """The layer is of the newest checkpoint. A peer that comes back alone takes the checkpoint
    before, and comes to the same losses again."""
    run = make_run(folder, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        (a,) = await begun(swarm, run, "a")
        await swarm.until(lambda: len(_saved_by(a)) > 1 and a.step() % 10 == 5, "it saves", 60)
        swarm.kill(a)
        newest, before = max(_saved_by(a)), a.losses()
        damaged = layer_path(_saved_by(a)[newest], 1)
        content = damaged.read_bytes()
        damaged.write_bytes(content[: len(content) // 8].ljust(len(content), b"\0"))
        swarm.start(a)
        await swarm.until(lambda: a.told_step() > max(before), "it trains again", 60)
        after = [it for it in a.events() if it["event"] == "step"][len(before) :]
        again = {it["step"]: it["loss"] for it in after if it["step"] in before}
        assert again == {step: before[step] for step in again}, "its losses are the same"
        assert min(again) == newest - 10, "it goes by the one before"

    play(SEED, folder / "world", scene)


def _saved_by(peer: Peer) -> dict[int, Path]:
    """Whole checkpoints, by step."""
    saved = [it for root in checkpoint_roots(peer.home) for it in list_checkpoints(root)]
    return {it.manifest.step: it.directory for it in saved if is_whole(it)}


def _joiners_of(peer: Peer) -> set[str]:
    return {joiner.peer_id for joiner in agreement_of(peer).joiners}


def one_accuses_another_member_each_time(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """The accusations begin once all are back. The scene is of the agreement alone, which hears the
    same words from daemons."""
    colluders = Colluders("abcd", "a", 1, wait_for_all=True)
    colluders.world.run_to(2 * WATCHED_NS)
    assert len(colluders.out_ever) == 1, "no second honest member goes"


def who_leaves_at_last_is_the_only_one_to_give(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """No remaining member has room for the leaver's layers, and no steps happen. When the leaver
    has waited for a minute, a member with room has just come and taken over a view of both."""
    run = make_run(folder, 2000, saves_every_steps=1000)
    late = Late(patches, "ready", LATE_S)

    async def scene(swarm: Swarm) -> None:
        plan = _at_the_first_that_stays(*(swarm.identity_of(name).peer_id for name in "ab"))
        patches.setattr(worlds, "compute_plan", plan)
        patches.setattr(views, "guards_in", lambda snapshot, plan: {})
        a, _ = await begun(swarm, run, "ac")
        await swarm.until(lambda: a.step() >= 10, "steps", 60)
        swarm.leave(a)
        await swarm.until(lambda: _waits_for_room(a), "no steps happen", 20)
        b = swarm.peer("b", initial_peers=(swarm.address(a),))
        late.begin(b.peer_id, a.peer_id)
        swarm.start(b)
        await swarm.until(lambda: _was_in_a_view(b), "one with room is in a view", 40)
        assert _waits_for_room(a) and late.count, "in which who leaves is not itself yet"
        patches.setattr(departure, "LEAVE_LIMIT_S", 0.0)  # its minute is over
        await swarm.until(lambda: not a.is_running, "it leaves", 60)
        last = a.step()
        await swarm.until(lambda: b.step() > last, "the other goes on", 20)

    play(SEED, folder / "world", scene)


def one_is_let_in_with_the_last_step(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """The newcomer stays, with no word of that step that shows others that the run is complete. The
    members that a peer cut off from all asks have such words."""
    run = make_run(folder, LAST)
    vouch = Syncing.vouch

    def with_the_last(syncing: Syncing) -> ViewId | None:
        return vouch(syncing) if syncing._state.step == LAST else None

    async def scene(swarm: Swarm) -> None:
        founder = swarm.identity_of("a").peer_id
        patches.setattr(worlds, "compute_plan", _replicas_beside(founder))
        patches.setattr(swarms, "FLOPS_PER_S", SLOW)
        patches.setattr(Syncing, "vouch", with_the_last)
        a, b, d = await begun(swarm, run, "abd", exit_when_done=False)
        c = swarm.peer("c", initial_peers=(swarm.address(a),), exit_when_done=False)
        await swarm.until(lambda: min(it.step() for it in (a, b, d)) >= 1, "steps", 60)
        for peer in (a, b, c):
            swarm.cut(peer, d)
        await swarm.until(are_in_views_of([a, b], 2), "they go on", 30)
        swarm.start(c)
        await swarm.until(are_in_views_of([a, b], 3), "it is let in", 60)
        await swarm.until(lambda: min(it.told_step() for it in (a, b, c)) == LAST, "the end", 20)
        spec = participant_of(c).membership.run.spec
        for peer in (a, b, c):
            end = agreement_of(peer).proof_of_end
            assert end is not None and shows_end(peer.peer_id, end, spec) == (peer is not c)
            swarm.mend(peer, d)
        await swarm.until(lambda: not d.is_running, "it hears of the end", 60)

    play(SEED, folder / "world", scene)


def _replicas_beside(founder: str) -> Any:
    """The replicas stand beside the founder while it is there. Nobody else has room."""

    def plan(snapshot: Snapshot) -> Any:
        here = {record.peer_id for record in snapshot.records}
        return replicas(snapshot) if founder in here else NoPlan("nobody here has room")

    return plan


def _at_the_first_that_stays(*holders: str) -> Any:
    def plan(snapshot: Snapshot) -> Plan | NoPlan:
        workload = snapshot.workload
        here = sorted(it.peer_id for it in snapshot.records if it.intent is Intent.TRAIN)
        holder = next((it for it in holders if it in here), None)
        if holder is None:
            return NoPlan("nobody here has room")
        pipeline = Pipeline(
            (Stage(holder, 0, workload.layer_count, 1),), 0, workload.microbatch_count
        )
        return Plan((pipeline,), tuple(it for it in here if it != holder), LONG_NS)

    return plan


def _waits_for_room(peer: Peer) -> bool:
    view = agreement_of(peer).view
    return view is not None and isinstance(view.plan, NoPlan)


def _was_in_a_view(peer: Peer) -> bool:
    return any(event["event"] == "view" for event in peer.events())
