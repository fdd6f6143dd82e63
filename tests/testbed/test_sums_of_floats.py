"""Members state the same bits, whichever Python adds the numbers up. From 3.12 on `sum` makes up
for rounding, and 3.11 does not."""

import builtins
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.swarm import Swarm, play

STEPS = 8
SUM_IN_ORDER = builtins.sum


def summed_with_care(numbers: Iterable[Any], start: Any = 0) -> Any:
    """`sum` as Python 3.12 does it."""
    values = [start, *numbers]
    if not all(isinstance(each, int | float) for each in values):
        return SUM_IN_ORDER(values[1:], start)
    if not any(isinstance(each, float) for each in values):
        return SUM_IN_ORDER(values[1:], start)
    total = lost = 0.0
    for each in map(float, values):
        after = total + each
        lost += (total - after) + each if abs(total) >= abs(each) else (each - after) + total
        total = after
    return total + lost


def stated(run: Path, folder: Path) -> list[tuple[float, float]]:
    """The norms and losses of two replicas, which audit each other, in each step."""

    async def scene(swarm: Swarm) -> Peer:
        first = swarm.peer("first", run=str(run), expect_peers=2)
        other = swarm.peer("other", initial_peers=(swarm.address(first),))
        swarm.start(first)
        await swarm.until(lambda: first.has_run, "the run is founded", 60)
        swarm.start(other)
        await swarm.until(lambda: not first.is_running, "the run", 600)
        return first

    events = play(1, folder, scene).events()
    steps = [event for event in events if event["event"] == "step"]
    return [(step["gradient_norm"], step["loss"]) for step in steps]


def test_norms_and_losses_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = with_audits(make_run(tmp_path, STEPS), rate=1.0)
    before = stated(run, tmp_path / "before")
    assert len(before) >= STEPS
    monkeypatch.setattr(builtins, "sum", summed_with_care)
    assert sum([0.1] * 10) == 1.0 != SUM_IN_ORDER([0.1] * 10)
    assert stated(run, tmp_path / "after") == before
