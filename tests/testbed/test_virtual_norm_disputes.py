"""Real daemons in virtual time: twelve members in six pipelines, of which one has slow machines. A
liar disputes the norm of the sums of each of its co-holders."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.planner.planner import standing_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.daemon.trainer import step_loop
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.stage.emulated import emulated_device
from p2p_dtfm.train.stage.replay import work
from p2p_dtfm.train.stage.timed import TimedStageRunner

LIAR, LIES_FROM, STEPS = "a", 2, 4
FAST_FLOPS_PER_S, TIMES_SLOWER = 12_000_000, 6
ROWS, SLOW_ROW, CUT = ("ab", "cd", "ef", "gh", "kl", "ij"), "ij", 3
MICROBATCHES = {row: 3 if row == SLOW_ROW else 20 for row in ROWS}
NEXT_TO_NEVER = 1e-6


def here() -> str:
    process = PROCESS.get()
    return "" if process is None else process.name.split(".")[0]


def flops_per_s(name: str) -> int:
    return FAST_FLOPS_PER_S // (TIMES_SLOWER if name in SLOW_ROW else 1)


def timed_runner(spec: Any, states: Any, recompute: bool) -> Any:
    """Works that are computed again take as long as the machine takes for its own work."""
    device = emulated_device(spec, flops_per_s(here()), 0)
    return TimedStageRunner(device, spec, states, recompute)


def rows_planned(monkeypatch: pytest.MonkeyPatch, ids: dict[str, str]) -> None:
    """Plan by share: slow machines get few microbatches, as in real plans."""
    honest = worlds.compute_plan

    def compute_plan(snapshot: Any) -> Any:
        if (standing := standing_plan(snapshot)) is not None:
            return standing
        known = {record.peer_id for record in snapshot.records}
        if not known.issuperset(ids.values()):
            return honest(snapshot)
        at, pipelines = 0, []
        for (one, other), count in MICROBATCHES.items():
            last = snapshot.workload.layer_count
            stages = Stage(ids[one], 0, CUT, 2), Stage(ids[other], CUT, last, 1)
            pipelines.append(Pipeline(stages, at, count))
            at += count
        return Plan(tuple(pipelines), (), 5_000_000_000)

    monkeypatch.setattr(worlds, "compute_plan", compute_plan)


def lies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    told: list[int] = []
    claim, say = Audits._claim, step_loop.StepLoop._say_prepared

    def changed(me: str, local: Any, plan: Any) -> Any:
        """Changes the norm by a power of two: the norms of its sums add up to the one that is
        stated for all."""
        segments, norms = plan.segments(), {}
        for n, each in local.norms.items():
            both = zip(segments[n].holders, each, strict=True)
            norms[n] = tuple(it if holder == me else 4.0 * it for holder, it in both)
        squared = local.squared_norms | {n: added_up(each) for n, each in norms.items()}
        return dataclasses.replace(local, norms=norms, squared_norms=squared)

    async def claim_other(self: Any, step: Any, local: Any) -> Any:
        if here() == LIAR and step.step >= LIES_FROM and local.norms:
            told.append(step.step)
            local = changed(self._tools.me, local, step.plan)
        return await claim(self, step, local)

    def say_other(self: Any, view: Any, step: int, local: Any, *rest: Any) -> None:
        if here() == LIAR and step >= LIES_FROM and local.norms:
            local = changed(self._tools.me, local, view.plan)
        say(self, view, step, local, *rest)

    monkeypatch.setattr(Audits, "_claim", claim_other)
    monkeypatch.setattr(step_loop.StepLoop, "_say_prepared", say_other)
    return told


@pytest.mark.nightly
def test_one_that_disputes_all_norms_goes_and_none_that_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All works were computed again by all, one after the other. Of two slow honest members first
    one was left out for it, then the other, and the liar last."""
    monkeypatch.setattr(work, "runner_once", timed_runner)
    ids: dict[str, str] = {}
    rows_planned(monkeypatch, ids)
    told = lies(monkeypatch)
    run = make_run(tmp_path, STEPS)
    spec = json.loads(run.read_text())
    spec["batch"] = {"global_batch": sum(MICROBATCHES.values()), "microbatch": 1}
    run.write_text(json.dumps(spec))
    audited = with_audits(run, NEXT_TO_NEVER)
    views: list[set[str]] = []

    async def scene(swarm: Swarm) -> None:
        swarm.are_equal = swarm.network.links.are_near = True
        names = "".join(ROWS)
        ids.update({name: swarm.identity_of(name).peer_id for name in names})
        first = swarm.peer(LIAR, run=str(audited), expect_peers=len(names))
        known = (swarm.address(first),)
        peers = [first, *(swarm.peer(it, initial_peers=known) for it in names if it != LIAR)]
        for peer, name in zip(peers, names, strict=True):
            peer.flops_per_s = flops_per_s(name)
        swarm.start(first)
        await swarm.until(lambda: first.has_run, "the run is founded", 60)
        for peer in peers[1:]:
            swarm.start(peer)
        await swarm.until(lambda: not any(it.is_running for it in peers), "the run", 1500)
        events = swarm.named("c").events()
        views.extend(set(it["members"]) for it in events if it["event"] == "view")

    play(1, tmp_path / "world", scene)
    assert told == [LIES_FROM], "it goes in the first step in which it lies"
    full = set(ids.values())
    assert full in views and full - {ids[LIAR]} in views
    assert all(full - view <= {ids[LIAR]} for view in views)
