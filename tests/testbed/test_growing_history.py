"""What a daemon writes of its run, read while it writes."""

import json
from pathlib import Path

from p2p_dtfm.testbed.growing_history import GrowingHistory


def test_a_step_that_is_repeated_in_a_view_is_one_of_that_view(tmp_path: Path) -> None:
    """A swarm that lost its newest state repeats steps, and none of these is above the highest
    there was."""
    path = tmp_path / "runs" / "a" / "events.jsonl"
    path.parent.mkdir(parents=True)
    history = GrowingHistory(tmp_path)

    def write(**event: object) -> None:
        with path.open("a") as file:
            file.write(json.dumps(event) + "\n")
        history.read()

    write(event="view", view=1, step=0)
    assert not history.has_stepped
    write(event="step", step=150, loss=2.0)
    assert history.has_stepped and history.step == 150
    write(event="view", view=2, step=10)
    write(event="step", step=9, loss=3.0)
    assert not history.has_stepped and history.step == 150
    write(event="step", step=11, loss=None)
    assert not history.has_stepped, "what others did is no step of its own"
    write(event="step", step=12, loss=3.0)
    assert history.has_stepped and history.step == 150
