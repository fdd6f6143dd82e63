"""One peer trains, and another without room for a stage has copies of its layers. The trainer is
killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.plain_losses import plain_losses
from tests.e2e.helpers import (
    losses,
    safe_of,
    shards_of,
    state_of,
    step_of,
    wait_until,
    write_endless_spec,
)
from tests.e2e.parity import TOLERANCE

STEPS_AFTER_CUT = 5
STEPS_AFTER_KILL = 5


@pytest.mark.nightly
def test_training_goes_on_from_the_newest_whole_cut(tmp_path: Path) -> None:
    """Nobody saves a checkpoint in time, so what is not in the guardian's memory is lost."""
    spec = write_endless_spec(tmp_path, checkpoint={"every_steps": 100_000})
    threads = ["--threads", "1"]
    with LocalSwarm(tmp_path) as swarm:
        founder, address = swarm.found(["--run", str(spec), *threads])
        guardian = swarm.join(address, ["--memory-gib", "0.0005", *threads])
        wait_until(lambda: bool(views(guardian)), "it is a member")
        said = views(guardian)[-1].get("may_repeat_steps", 0)
        assert said > 0, "to wait for a guardian would take more than 2% of such short steps"
        joined_at = views(guardian)[-1]["step"]
        wait_until(lambda: safe_of(founder) >= joined_at, "a cut is whole")
        safe = safe_of(founder)
        wait_until(lambda: step_of(founder) >= safe + STEPS_AFTER_CUT, "steps after the cut")
        assert state_of(guardian)[0] == "spare"
        wait_until(lambda: shards_of(guardian) == shards_of(founder), "the data are there twice")
        third = swarm.join(address_of(guardian), threads)
        os.kill(founder.process.pid, signal.SIGKILL)
        killed_at = step_of(founder)
        end = killed_at + STEPS_AFTER_KILL
        wait_until(lambda: step_of(third) >= end, "whoever has room for it goes on")
    goes_on_from = min(view["step"] for view in views(third))
    assert safe <= goes_on_from <= killed_at, "from a cut, and none older than one that was whole"
    costs = killed_at + 1 - goes_on_from
    assert costs <= max(said, 20) or seconds_of(founder, goes_on_from) <= 30, "whichever is more"
    expected = plain_losses(third.home, end)
    assert expected is not None, "who leaves last saves what it has"
    for child in (founder, third):
        worst = max(abs(loss - expected[n]) for n, loss in losses(child).items() if n < end)
        assert worst < TOLERANCE, f"{child.name} is {worst} off the plain loop"


def seconds_of(child: Child, first_step: int) -> float:
    """The time of this daemon's steps from this one on."""
    times = [it["time_s"] for it in child.events() if it["event"] == "step"]
    return float(times[-1] - times[-1 - (step_of(child) - first_step)])


def address_of(child: Child) -> str:
    """Where others may ask to join, at a peer that stays."""
    facts = child.status()
    assert facts is not None and facts["addresses"]
    (first, *_) = facts["addresses"]
    return str(first)


def views(child: Child) -> list[dict[str, Any]]:
    return [event for event in child.events() if event["event"] == "view"]
