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
        def start(self, module: str, arguments: list[str], *files: Any) -> None:
            started.append(list(arguments))

    monkeypatch.setattr(local_swarm, "NURSERY", Nursery())
    swarm = LocalSwarm(tmp_path, ["--threads", "1"])
    swarm.start([])
    swarm.start(["--device", "emulated:40"])
    told = [[b for a, b in itertools.pairwise(each) if a == "--device"] for each in started]
    assert told == [["cpu"], ["cpu", "emulated:40"]], "the last one counts"
