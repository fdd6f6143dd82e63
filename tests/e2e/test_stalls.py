"""A member that computes nothing, and says that it waits, costs the others seconds. Each run of the
tests has the same in virtual time (`tests/testbed/test_virtual_stalls.py`)."""

import os
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import logged, step_of, wait_until, write_endless_spec

STALLS_AT = 12
HOLD_UP_LIMIT_S = 10.0
PATIENT_STEPS = 15


@pytest.mark.nightly
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
        wait_until(lambda: min(map(step_of, rest)) > 2 * STALLS_AT, "the others train on")
        assert logged(liar, "rejoins")
        assert not any(logged(child, "rejoins") for child in rest)
        for child in rest:
            limit_s = HOLD_UP_LIMIT_S + PATIENT_STEPS * usual_s(child)
            assert max(gaps_s(child, STALLS_AT - 1)) <= limit_s


def usual_s(child: Child) -> float:
    """The usual time of a step. A busy machine makes others patient for some of these
    (`core.liveness.pace`)."""
    return statistics.median(gaps_s(child, STALLS_AT // 2, STALLS_AT))


def gaps_s(child: Child, first: int, end: int = 1 << 60) -> list[float]:
    """Seconds between the commits of these steps."""
    events = [event for event in child.events() if event["event"] == "step"]
    times = [event["time_s"] for event in events if first <= event["step"] < end]
    return [after - before for before, after in pairwise(times)]
