"""`p2p-dtfm chaos --storm`: daemons are killed one after another, as long as somebody watches."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_dtfm.testbed.storm_facts import LEAST_SAMPLES, StormFacts
from tests.e2e.helpers import assert_nothing_is_left, errors_of, run_program

KILLS_SEEN = 3


@pytest.mark.nightly
def test_a_storm_that_is_interrupted_is_judged_for_what_it_did(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = ["chaos", "--storm", "--peers", "4", "--kills", "500", "--keep", str(kept), "--json"]
    storm = subprocess.Popen(
        [sys.executable, "-m", "p2p_dtfm", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert storm.stderr is not None and storm.stdout is not None
    told = list(itertools.islice(_kills(storm.stderr), KILLS_SEEN))
    storm.send_signal(signal.SIGINT)
    rest = storm.stderr.read()
    report = json.loads(storm.stdout.read().splitlines()[-1])
    assert storm.wait() == 0 and report["ok"], (report["violations"], rest)
    assert len(told) == KILLS_SEEN <= report["kills"] <= KILLS_SEEN + 1
    assert f"kill {KILLS_SEEN} of 500" in told[-1] and "min left" in told[-1]
    assert report["compared_steps"] == report["total_steps"] == report["committed_steps"]
    assert report["max_loss_difference"] < 1e-4
    assert report["recovery_s"]["kill"]["count"] == report["kills"]
    assert f"{report['kills']} of 500 kills of 4 daemons" in rest
    assert_nothing_is_left(kept)


def _kills(lines: Iterator[str]) -> Iterator[str]:
    return (line for line in lines if "kill " in line)


def test_bad_input_is_refused_in_words(tmp_path: Path) -> None:
    none = run_program("chaos", "--storm", "--kills", "0")
    assert none.returncode == 2 and "--kills: must be 1 or more" in errors_of(none)
    alone = run_program("chaos", "--storm", "--peers", "1")
    assert alone.returncode == 2 and "--peers: must be 3 or more" in errors_of(alone)
    both = run_program("chaos", "--storm", "--faults", "2")
    assert both.returncode == 2 and "does not go with --faults" in errors_of(both)
    without = run_program("chaos", "--kills", "2")
    assert without.returncode == 2 and "add --storm" in errors_of(without)


def test_memory_is_compared_between_the_ends_of_a_long_life() -> None:
    settled = [100] * (LEAST_SAMPLES - 3)
    facts = StormFacts({1: [10, 50, 90, *settled[1:]]})
    assert facts.growth() is None, "it has not lived for long enough"
    facts = StormFacts({1: [10, 50, 90, *settled, 100, 105, 300], 2: [100] * 20, 3: [7]})
    growth = facts.growth()
    assert growth is not None and growth.survivors == 2, "its first samples do not count"
    assert (round(growth.total, 3), round(growth.worst, 3)) == (0.025, 0.05)
