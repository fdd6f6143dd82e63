"""`p2p-dtfm chaos --storm`: daemons are killed one after another, as long as somebody watches."""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from p2p_dtfm.cli.scenarios.storm import not_looked_at, storm_summary
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
    assert report["not_looked_at"][0] == "how memory grows" and "held, as far as" in rest
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


def _summary(**changes: object) -> tuple[list[str], str]:
    """What was not looked at, and the last line that the program says."""
    report: dict[str, Any] = {"kills": 9, "wanted_kills": 9, "peers": 4, "took_s": 60.0}
    report |= {"same_home": 5, "whole_s": None, "recovery_s": {}, "violations": [], "ok": True}
    report |= {"committed_steps": 50, "total_steps": 50, "compared_steps": 50, "views": 18}
    report |= dict.fromkeys(("lost_samples", "duplicated_samples", "repeated_steps"), 0)
    report |= {"max_loss_difference": 1e-7, "not_compared": None}
    report |= {"memory": {"survivors": 3, "total": 0.01, "worst": 0.02, "longest": 0.01}, **changes}
    report["not_looked_at"] = not_looked_at(report)
    console = Console(file=io.StringIO(), width=200)
    storm_summary(console, report)
    assert isinstance(console.file, io.StringIO)
    return report["not_looked_at"], console.file.getvalue().splitlines()[-1]


def test_what_was_not_looked_at_has_not_held() -> None:
    assert _summary() == ([], "all invariants held")
    assert _summary(ok=False) == ([], "NOT ok")
    missing, line = _summary(compared_steps=0, max_loss_difference=None, memory=None)
    assert missing == ["losses", "how memory grows"]
    assert line == "held, as far as looked at; not losses, how memory grows"
    missing, line = _summary(compared_steps=20, kills=3)
    assert missing == ["losses of 30 steps", "6 kills"] and line.startswith("held, as far as")


def test_memory_is_compared_between_the_ends_of_a_long_life() -> None:
    settled = [100] * (LEAST_SAMPLES - 3)
    facts = StormFacts({1: [10, 50, 90, *settled[1:]]})
    assert facts.growth() is None, "it has not lived for long enough"
    facts = StormFacts({1: [10, 50, 90, *settled, 100, 105, 300], 2: [100] * 20, 3: [7]})
    growth = facts.growth()
    assert growth is not None and growth.survivors == 2, "its first samples do not count"
    assert (round(growth.total, 3), round(growth.worst, 3)) == (0.025, 0.05)
    assert growth.longest == 0.0, "number 2 has lived longer than number 1"
