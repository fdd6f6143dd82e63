"""Real daemons in virtual time: audits of many microbatches, machines take seconds for each.

An audit was one job, so nobody saw it get on. Where one work was drawn its auditor computed thirty
microbatches while the others only waited: after twenty of them and five seconds it "completed
nothing", and the honest auditor was out."""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.audit import draw as draws
from p2p_dtfm.core.audit.draw import draw
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.virtual import swarm as swarms
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.emulated import emulated_device
from p2p_dtfm.train.stage.replay import work
from p2p_dtfm.train.stage.timed import TimedStageRunner
from tests.testbed.begun import begun

NAMES = "abcd"
STEPS = 2
MICROBATCHES = 128
FLOPS_PER_S = 3_000_000
"""Length of a microbatch: two seconds."""


def draw_one(
    seed: str,
    holders: Sequence[str],
    judges_of: Callable[[str], Sequence[str]],
    rate_millionths: int,
    always: Collection[str] = (),
) -> dict[str, str]:
    found = draw(seed, holders, judges_of, rate_millionths, always)
    return dict(sorted(found.items())[:1])


def timed_runner(spec: RunSpec, states: dict[int, LayerState], recompute: bool) -> Any:
    device = emulated_device(spec, FLOPS_PER_S, 0)
    return TimedStageRunner(device, spec, states, recompute)


def test_who_audits_many_microbatches_is_seen_to_get_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarms, "FLOPS_PER_S", (1, FLOPS_PER_S))
    monkeypatch.setattr(draws, "draw", draw_one)
    monkeypatch.setattr(work, "runner_once", timed_runner)
    run = make_run(tmp_path, STEPS)
    spec = json.loads(run.read_text())
    spec["batch"] = {"global_batch": MICROBATCHES, "microbatch": 1}
    run.write_text(json.dumps(spec))
    run = with_audits(run, 1.0)

    async def scene(swarm: Swarm) -> tuple[set[int], list[float]]:
        peers = await begun(swarm, run, NAMES)
        await swarm.until(lambda: not any(it.is_running for it in peers), "the run", 2000)
        events = [event for peer in peers for event in peer.events()]
        views = {len(event["members"]) for event in events if event["event"] == "view"}
        return views, [it["at_s"] for it in peers[0].events() if it["event"] == "step"]

    views, at_s = play(1, tmp_path / "world", scene)
    assert views == {len(NAMES)} and len(at_s) == STEPS + 1, "and what is held out"
    assert at_s[1] - at_s[0] > 2 * 1.8 * MICROBATCHES / len(NAMES), "as long again"
