"""Scenes for bugs of steps and of what outlives them, which no tried seed had found. Each is green
on the daemon as it is, and red with the bug. `test_virtual_scenes.py` plays them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.messages.prepared import Statement
from p2p_dtfm.core.planner.planner import standing_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.recovery import view as views
from p2p_dtfm.daemon.trainer.view_mail import ViewMail
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import agreement_of, begun, participant_of
from tests.testbed.late import LOST_S, Late
from tests.testbed.test_virtual_followed_states import replicas
from tests.testbed.test_virtual_guardians_that_ask_again import STEP_NS, two_stages_and_a_spare
from tests.testbed.test_virtual_safe_steps import LONG_NS
from tests.testbed.test_virtual_speed import view_of

SEED = 1
SLOW_S = 2.0
LATE_S = 2.0
"""More time than it takes to find out that a member has died."""
LATER_S = 3.0
"""Others agree without that word, and the member that lacks it hears of the view half a second
later."""
ASKS_S = 1.0
COMPUTES_S = 0.3
"""By so much longer may the other holder take to compute the same step."""


def a_view_ends_while_data_come(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """The data are for a peer that is about to compute in that view. From the dead peer nothing
    comes any more."""
    run = make_run(folder, 2000, saves_every_steps=1000)
    patches.setattr(worlds, "compute_plan", replicas)

    async def scene(swarm: Swarm) -> None:
        a, b, c, d = await begun(swarm, run, "abcd")
        await swarm.until(lambda: min(it.step() for it in (a, b, c, d)) >= 5, "steps", 60)
        fetches, held = participant_of(b), list[bool]()
        fetch_shards = fetches.fetch_shards

        async def slowly(digests: set[str]) -> None:
            if not held:
                held.append(True)
                await asyncio.sleep(SLOW_S)
            await fetch_shards(digests)

        patches.setattr(fetches, "fetch_shards", slowly)
        await swarm.until(lambda: bool(held), "it fetches", 20)
        last = a.step()
        swarm.kill(c)
        others = (a, b, d)
        await swarm.until(lambda: min(it.step() for it in others) >= last + 5, "they go on", 30)
        assert len(view_of(a).members) == 3, "nobody is blamed"

    play(SEED, folder / "world", scene)


def _guarded_by(*guardians: str) -> Any:
    """What one peer holds alone is guarded by the first of `guardians` that is here."""

    def guards_in(snapshot: Snapshot, plan: Any) -> dict[int, str]:
        here = {record.peer_id for record in snapshot.records}
        if not isinstance(plan, Plan):
            return {}
        guards = {}
        for layer in range(snapshot.workload.layer_count):
            holders = plan.holders(layer)
            others = (it for it in guardians if it in here and it not in holders)
            if len(holders) == 1 and (guardian := next(others, "")):
                guards[layer] = guardian
        return guards

    return guards_in


def _halves_and_spares(first: str, *seconds: str) -> Any:
    """The second half belongs to the first of `seconds` that is here."""

    def plan(snapshot: Snapshot) -> Any:
        if (standing := standing_plan(snapshot)) is not None:
            return standing
        workload, here = snapshot.workload, {record.peer_id for record in snapshot.records}
        count, second = workload.layer_count, next(it for it in seconds if it in here)
        halves = (Stage(first, 0, count // 2, 1), Stage(second, count // 2, count, 1))
        pipeline = Pipeline(halves, 0, workload.microbatch_count)
        return Plan((pipeline,), tuple(sorted(here - {first, second})), STEP_NS)

    return plan


def _first_step_of_last_view(peer: Peer) -> int:
    return [int(event["step"]) for event in peer.events() if event["event"] == "view"][-1]


def _halves_and_a_whole(first: str, second: str, whole: str) -> Any:
    """Each layer has two holders as long as `whole` is there."""

    def plan(snapshot: Snapshot) -> Any:
        if (standing := standing_plan(snapshot)) is not None:
            return standing
        workload, here = snapshot.workload, {record.peer_id for record in snapshot.records}
        count, total = workload.layer_count, workload.microbatch_count
        halves = (Stage(first, 0, count // 2, 1), Stage(second, count // 2, count, 1))
        if whole not in here:
            return Plan((Pipeline(halves, 0, total),), (), LONG_NS)
        alone = Pipeline((Stage(whole, 0, count, 1),), total // 2, total - total // 2)
        return Plan((Pipeline(halves, 0, total // 2), alone), (), LONG_NS)

    return plan


def who_has_committed_alone_needs_the_others_gradients(
    folder: Path, patches: pytest.MonkeyPatch
) -> None:
    """The peer is a step ahead. A member that has not heard of that commit can roll the other half
    forward, and the last copy of that half's next states dies."""
    run = make_run(folder, 2000, saves_every_steps=1000)
    late = Late(patches, "prepared", LOST_S)

    async def scene(swarm: Swarm) -> None:
        whole, first, second = (swarm.identity_of(name).peer_id for name in "abc")
        plan = _halves_and_a_whole(first, second, whole)
        patches.setattr(worlds, "compute_plan", plan)
        a, b, c = await begun(swarm, run, "abc")
        await swarm.until(lambda: min(it.step() for it in (a, b, c)) >= 5, "steps", 60)
        since = b.step()
        late.begin(c.peer_id, b.peer_id)
        await swarm.until(lambda: c.step() > b.step() >= since, "one has committed, one not", 20)
        last = c.step()
        swarm.kill(a)
        late.end()
        await swarm.until(lambda: min(b.step(), c.step()) >= last + 3, "they go on", 30)
        assert _first_step_of_last_view(c) == last + 1, "the step is not computed again"

    play(SEED, folder / "world", scene)


def a_guardian_hears_late_what_its_holder_knows(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """The holder knows that a step is committed. Before it moves its copies on, the guardian waits
    until it can show that to others, and the holder dies."""
    run = make_run(folder, 2000, saves_every_steps=1000)
    patches.setattr(worlds, "compute_plan", two_stages_and_a_spare)
    late = Late(patches, "prepared", LATE_S)

    async def scene(swarm: Swarm) -> None:
        ids = sorted(swarm.identity_of(name).peer_id for name in "abc")
        patches.setattr(views, "guards_in", _guarded_by(ids[2]))
        named = {it.peer_id: it for it in await begun(swarm, run, "abc")}
        holder, other, guardian = (named[it] for it in ids)
        await swarm.until(lambda: min(it.step() for it in named.values()) >= 5, "steps", 60)
        view = view_of(holder)
        assert view.guards and view.cut_pace is None, "guardians keep up"
        since = holder.step()
        late.begin(other.peer_id, guardian.peer_id)
        await swarm.until(lambda: holder.step() > since + 2, "steps", 60)
        last = holder.step()
        swarm.kill(holder)
        late.end()
        await swarm.until(lambda: other.step() >= last + 3, "they go on", 40)
        assert _first_step_of_last_view(other) >= last + 1, "nothing is computed again"

    play(SEED, folder / "world", scene)


def prepared_comes_before_the_view_that_it_is_of(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """All is computed, and waits for the receipts of a guardian that dies. Another peer guards
    then: of two holders one takes over, has nothing to compute, and says Prepared. The other lacks
    a third member's word for that view."""
    run = _without_evaluations(make_run(folder, 2000, saves_every_steps=1000))
    receipts, ready = Late(patches, "receipt", LOST_S), Late(patches, "ready", LATER_S)
    kept: list[str] = []
    keep_early = ViewMail.keep_early

    def keep(mail: ViewMail, statement: Statement) -> None:
        kept.append(mail._me)
        keep_early(mail, statement)

    async def scene(swarm: Swarm) -> None:
        ids = {name: swarm.identity_of(name).peer_id for name in "abcd"}
        patches.setattr(worlds, "compute_plan", _halves_and_spares(ids["b"], ids["c"]))
        patches.setattr(views, "guards_in", _guarded_by(ids["d"], ids["a"]))
        a, b, c, d = await begun(swarm, run, "abcd")
        await swarm.until(lambda: min(it.step() for it in (a, b, c, d)) >= 5, "steps", 60)
        assert view_of(b).guards and view_of(b).cut_pace is None, "guardians keep up"
        trainer = participant_of(b).trainer

        def waits() -> bool:
            owed = trainer._followers.receipts
            step = agreement_of(b).step
            return owed is not None and bool(owed.waits_for(step)) and not trainer._steps.computes

        receipts.begin(d.peer_id, b.peer_id)
        await swarm.until(waits, "it waits for receipts", 20)
        await asyncio.sleep(COMPUTES_S)
        step, before = agreement_of(b).step, view_of(b)
        ready.begin(a.peer_id, c.peer_id)
        patches.setattr(ViewMail, "keep_early", keep)
        swarm.kill(d)
        await swarm.until(lambda: agreement_of(b).view is not before, "a view", 10)
        receipts.end()
        # by then nobody has passed it on to who lacks it
        await swarm.until(lambda: min(b.step(), c.step()) >= step, "the step commits", 1)
        assert kept == [c.peer_id], "its Prepared came early"

    play(SEED, folder / "world", scene)


def who_takes_a_place_asks_late_for_its_states(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """One half has sent all that the other half needs of a step when it dies. The other half is its
    guardian, and in the next view only waits for the newcomer in that place. By then the newcomer
    asks it for the states."""
    run = _without_evaluations(make_run(folder, 2000, saves_every_steps=1000))
    receipts, asks = Late(patches, "receipt", LOST_S), Late(patches, "follow", ASKS_S)

    async def scene(swarm: Swarm) -> None:
        ids = {name: swarm.identity_of(name).peer_id for name in "abcd"}
        patches.setattr(worlds, "compute_plan", _halves_and_spares(ids["b"], ids["c"], ids["a"]))
        patches.setattr(views, "guards_in", _guarded_by(ids["b"], ids["d"]))
        a, b, c, d = await begun(swarm, run, "abcd")
        await swarm.until(lambda: min(it.step() for it in (a, b, c, d)) >= 5, "steps", 60)
        status = participant_of(b).local.status
        receipts.begin(b.peer_id, c.peer_id)
        waits_for_c = [c.peer_id]
        await swarm.until(lambda: status.facts["waits_for"] == waits_for_c, "it waits", 20)
        await asyncio.sleep(COMPUTES_S)
        step, before = agreement_of(b).step, view_of(b)
        asks.begin(a.peer_id, b.peer_id)
        swarm.kill(c)
        await swarm.until(lambda: agreement_of(b).view is not before, "a view", 10)
        await swarm.until(lambda: status.facts["waits_for"] == [a.peer_id], "it waits again", 2)
        assert asks.count, "nobody has asked it yet"
        await swarm.until(lambda: min(a.step(), b.step()) >= step + 2, "they go on", 8)

    play(SEED, folder / "world", scene)


def _without_evaluations(run: Path) -> Path:
    spec = json.loads(run.read_text())
    spec["evaluation"]["every_steps"] = 1000
    run.write_text(json.dumps(spec))
    return run
