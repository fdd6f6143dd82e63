"""How a local swarm starts its daemons."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.testbed import local_swarm
from p2p_dtfm.testbed.local_swarm import LocalSwarm


def test_daemons_share_the_processor_unless_one_is_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default each would take the machine's accelerator, which has a single daemon."""
    started: list[list[str]] = []

    class Nursery:
        def start(self, module: str, arguments: list[str], *files: Any, **rest: Any) -> None:
            started.append(list(arguments))

    monkeypatch.setattr(local_swarm, "NURSERY", Nursery())
    swarm = LocalSwarm(tmp_path, ["--threads", "1"])
    swarm.start([])
    swarm.start(["--device", "emulated:40"])
    told = [[b for a, b in itertools.pairwise(each) if a == "--device"] for each in started]
    assert told == [["cpu"], ["cpu", "emulated:40"]], "the last one counts"


def test_daemons_of_a_swarm_do_not_obey_what_is_set_for_one_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With P2P_DTFM_HOURS=22-07 the demo paused by day, and with P2P_DTFM_INVITE no daemon
    founded."""
    monkeypatch.setenv("P2P_DTFM_SAID", "as its user wants")
    monkeypatch.setenv("SAID", "so")
    with LocalSwarm(tmp_path, module="tests.testbed.said_by_a_fork") as swarm:
        child = swarm.start(["names"])
        assert child.process.wait(60) == 0
    told = (child.home / "stdout").read_text().split()
    assert "SAID" in told and not [name for name in told if name.startswith("P2P_DTFM_")]
