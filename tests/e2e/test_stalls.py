"""A member that computes nothing, and says that it waits, costs the others seconds."""

import os
from itertools import pairwise
from pathlib import Path

from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import logged, step_of, wait_until, write_endless_spec

STALLS_AT = 40
HOLD_UP_LIMIT_S = 10.0


def test_who_stalls_is_out_within_seconds(tmp_path: Path) -> None:
    spec = write_endless_spec(tmp_path, checkpoint={"every_steps": 100_000})
    one = ["--threads", "1"]
    with LocalSwarm(tmp_path, module="tests.e2e.stalling_daemon") as swarm:
        founder, address = swarm.found(["--run", str(spec), "--expect-peers", "3", *one])
        honest = swarm.join(address, one)
        os.environ["STALLS_AT"] = f"{STALLS_AT},waits"
        try:
            liar = swarm.join(address, one)
        finally:
            del os.environ["STALLS_AT"]
        rest = [founder, honest]
        wait_until(lambda: min(map(step_of, rest)) >= 3 * STALLS_AT, "the others train on")
        assert logged(liar, "rejoins")
        assert not any(logged(child, "rejoins") for child in rest)
        for child in rest:
            assert longest_gap_s(child) <= HOLD_UP_LIMIT_S


def longest_gap_s(child: Child) -> float:
    """Between two commits from the step on at which the other one stalls."""
    events = [event for event in child.events() if event["event"] == "step"]
    times = [event["time_s"] for event in events if event["step"] >= STALLS_AT - 1]
    return max(after - before for before, after in pairwise(times))
