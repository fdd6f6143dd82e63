"""Daemons that come, go and are killed, as seen from outside."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.watched_swarm import WatchedSwarm


def test_who_has_ended_is_read_to_the_end_and_then_no_more(tmp_path: Path) -> None:
    """A storm has hundreds of dead daemons. Looking at their files ten times a second took half a
    core. A daemon that comes back in its home writes again."""
    swarm = LocalSwarm(tmp_path)
    end: list[int | None] = [None]
    process: Any = SimpleNamespace(pid=1, poll=lambda: end[0])
    swarm.children.append(Child("peer-0", tmp_path, process))
    path = tmp_path / "runs" / "a" / "events.jsonl"
    path.parent.mkdir(parents=True)
    watched = WatchedSwarm(swarm, {"id-0": "peer-0"}, 100)

    def written(step: int) -> int:
        with path.open("a") as file:
            file.write(json.dumps({"event": "step", "step": step, "loss": 2.0}) + "\n")
        return watched.step

    assert written(1) == 1
    end[0] = -9
    assert written(2) == 2, "what it wrote before it ended"
    assert written(3) == 2
    swarm.children.append(Child("peer-0", tmp_path, SimpleNamespace(pid=2, poll=lambda: None)))  # type: ignore[arg-type]
    assert written(4) == 4
