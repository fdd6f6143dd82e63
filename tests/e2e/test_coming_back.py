"""Founders are killed and come back with the same line. Members that come back with none are in
`test_restart`."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import time
from itertools import pairwise
from pathlib import Path

import pytest

from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import (
    errors_of,
    logged,
    losses,
    run_program,
    step_of,
    wait_until,
    write_endless_spec,
)
from tests.e2e.walking_daemon import MODULE

TOGETHER_WITHIN_S = 30.0
"""Seconds from the start of the process that comes back, on an idle machine."""


def kill(child: Child) -> None:
    os.kill(child.process.pid, signal.SIGKILL)
    child.process.wait()


def are_one_swarm(children: list[Child]) -> bool:
    """Whether all are members of the same view, in which all have seen committed steps."""
    said = [child.status() or {} for child in children]
    ids = {json.dumps((facts.get("view"), facts.get("snapshot"))) for facts in said}
    names = {tuple(facts.get("members", ())) for facts in said}
    return len(ids) == len(names) == 1 and len(said[0].get("members", ())) == len(children)


def assert_nothing_was_lost_or_counted_twice(stayed: Child, returned: Child) -> None:
    """The daemon that stayed has each step of the lineage that stays once. A repeated step has the
    same loss, and the daemon that came back has the same losses."""
    events = [event for event in stayed.events() if event["event"] == "step"]
    steps = [event["step"] for event in events]
    went_back = [n for n, (one, other) in enumerate(pairwise(steps)) if other != one + 1]
    assert len(went_back) <= 1, steps
    assert set(steps) == set(range(min(steps), max(steps) + 1))
    there, here = losses(stayed), losses(returned)
    assert all(is_the_same(event["loss"], there[event["step"]]) for event in events)
    both = set(there) & set(here)
    assert len(both) > 5 and all(is_the_same(there[step], here[step]) for step in both)


def is_the_same(one: float, other: float) -> bool:
    """The same but for the order of adding up. A step repeated after a failure is cut otherwise,
    and was 2.4e-8 off."""
    return math.isclose(one, other, rel_tol=1e-6)


@pytest.mark.nightly
def test_a_killed_founder_finds_its_swarm(tmp_path: Path) -> None:
    spec = write_endless_spec(tmp_path)
    line = ["--run", str(spec)]
    with LocalSwarm(tmp_path, ["--threads", "1", "--dashboard", "off"], MODULE) as swarm:
        founder, address = swarm.found(line)
        member = swarm.join(address)
        wait_until(lambda: are_one_swarm([founder, member]), "they train together")
        before = step_of(member)
        wait_until(lambda: step_of(member) > before + 5, "they go on")
        kill(founder)
        again = swarm.start(line, "again", founder.home)  # the other may not have noticed yet
        wait_until(lambda: are_one_swarm([again, member]), "one swarm, and not two")
        resumed = step_of(member)
        wait_until(lambda: min(map(step_of, (again, member))) > resumed + 6, "it goes on")
        assert logged(again, "met before") and not logged(again, "goes on from the checkpoint")
        assert_nothing_was_lost_or_counted_twice(member, again)


def test_without_a_past_nothing_is_begun(tmp_path: Path) -> None:
    done = run_program("--home", tmp_path / "home")
    assert done.returncode == 2 and not done.stdout
    text = errors_of(done)
    for choice in ("--initial-peers", "--run", "p2p-dtfm demo", "p2p-dtfm doctor"):
        assert choice in text


@pytest.mark.nightly
def test_of_a_home_that_runs_here_and_copied_elsewhere_the_older_daemon_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock of an identity lies on each machine by itself. Both daemons trained alone for as
    long as both ran, and one or the other threw the third one out."""
    line = ["--run", str(write_endless_spec(tmp_path))]
    with LocalSwarm(tmp_path, ["--threads", "1", "--dashboard", "off", "--log", "human"]) as swarm:
        founder, address = swarm.found(line)
        member = swarm.join(address)
        wait_until(lambda: are_one_swarm([founder, member]), "they train together")
        copy, elsewhere = tmp_path / "copy", tmp_path / "elsewhere"
        with contextlib.suppress(shutil.Error):  # the home is in use: a file that is gone meanwhile
            shutil.copytree(founder.home, copy, ignore=shutil.ignore_patterns("*.sock", "std*"))
        elsewhere.mkdir()
        monkeypatch.setenv("TMPDIR", str(elsewhere))
        twin = swarm.start([], "twin", copy)
        assert founder.process.wait(120) == 3, founder.log_tail()
        assert logged(founder, "another daemon speaks as this very peer (at ")
        wait_until(lambda: are_one_swarm([twin, member]), "one swarm with the newer one")
        before = step_of(member)
        wait_until(lambda: step_of(member) > before + 5, "it goes on")


CASES = list(itertools.product(("fixed", "random"), (5, 20, 90), (1, 3), (0, 2)))


@pytest.mark.nightly
@pytest.mark.parametrize("port,away_s,others,min_members", CASES)
def test_a_founder_comes_back(
    port: str, away_s: int, others: int, min_members: int, tmp_path: Path
) -> None:
    limits = {"limits": {"min_members": min_members}} if min_members else {}
    line = ["--run", str(write_endless_spec(tmp_path, **limits))]
    if port == "fixed":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            line += ["--listen", f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}"]
    line += ["--expect-peers", str(others + 1)]
    with LocalSwarm(tmp_path, ["--threads", "1", "--dashboard", "off"]) as swarm:
        founder, address = swarm.found(line)
        members = [swarm.join(address) for _ in range(others)]
        wait_until(lambda: are_one_swarm([founder, *members]), "they train together")
        wait_until(lambda: step_of(members[0]) > 20, "they get on")
        kill(founder)
        time.sleep(away_s)
        began_s, was = time.monotonic(), step_of(members[0])
        again = swarm.start(line, "again", founder.home)
        everyone = [again, *members]
        wait_until(lambda: are_one_swarm(everyone) and step_of(again) > was, "one swarm")
        took_s = time.monotonic() - began_s
        print(f"one swarm {took_s:.1f} s after its return")
        assert took_s < TOGETHER_WITHIN_S
        resumed = max(map(step_of, everyone))
        wait_until(lambda: min(map(step_of, everyone)) > resumed + 10, "it goes on")
        assert_nothing_was_lost_or_counted_twice(members[0], again)
