"""A crash comes right after a planned view, when a layer has just come to have a single holder."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import losses, safe_of, state_of, step_of, wait_until, write_endless_spec
from tests.e2e.parity import assert_equals_the_plain_loop

STEPS_BEFORE = 15
STEPS_AFTER = 10


@pytest.mark.nightly
def test_who_holds_a_layer_alone_may_die_as_soon_as_it_does(tmp_path: Path) -> None:
    """Four peers with room for half of the layers each are two pipelines, and three are one. Nobody
    saves a checkpoint, so what a single peer has would be lost with it, back to the first step.
    Guardians that kept up have their part of the first cut. Guardians that lagged may lack it yet;
    then a cut of the view before counts, which was safe."""
    spec = write_endless_spec(tmp_path, checkpoint={"every_steps": 100_000})
    half = ["--threads", "1", "--memory-gib", "0.0049"]
    with LocalSwarm(tmp_path) as swarm:
        founder, address = swarm.found(["--run", str(spec), "--expect-peers", "4", *half])
        leaver, *others = (swarm.join(address, half) for _ in range(3))
        rest = [founder, *others]
        wait_until(lambda: min(map(step_of, [*rest, leaver])) >= STEPS_BEFORE, "they train")
        wait_until(lambda: safe_of(founder) > 0, "what a kill takes is less than all")
        safe = safe_of(founder)
        known = len(views(founder))
        leaver.process.send_signal(signal.SIGTERM)
        wait_until(lambda: len(views(founder)) > known, "a view without a place for the leaver")
        begins = views(founder)[known]["step"]
        wait_until(lambda: max(map(step_of, rest)) > begins, "a step commits in it")
        victim = next(child for child in others if state_of(child)[0] == "training")
        os.kill(victim.process.pid, signal.SIGKILL)
        killed_at = max(map(step_of, rest))
        rest.remove(victim)
        end = killed_at + STEPS_AFTER
        wait_until(lambda: min(map(step_of, rest)) >= end, "the others go on")
    assert [child.process.returncode for child in rest] == [0, 0], "where all leave nobody waits"
    later = [
        view["step"] for view in views(founder) if view["view"] > views(founder)[known]["view"]
    ]
    lagged, lags = ("may_repeat_steps" in view for view in views(founder)[known - 1 : known + 1])
    first = killed_at if not lags else safe if lagged else begins
    assert later and min(later) >= first, "what the others had is the first cut, or an older one is"
    assert_equals_the_plain_loop(founder, step_of(founder) + 1, may_repeat=lags)
    assert losses(rest[1])[end] == losses(founder)[end]


def views(child: Child) -> list[dict[str, Any]]:
    return [event for event in child.events() if event["event"] == "view"]
