"""When the length of steps makes members ask for a new plan."""

from itertools import pairwise

import msgspec
import pytest

from p2p_dtfm.core.planner.planner import fixed_plan
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.telemetry.device_pace import DevicePace
from p2p_dtfm.daemon.telemetry.plan_times import FORGOTTEN_S, SETTLED_S, PlanTimes
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot

MILLISECOND_NS = 1_000_000


class Clock:
    """Steps of a swarm of two members."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.times = PlanTimes(lambda: self.now_s)

    def asked(self) -> str | None:
        """The reason to ask, after two looks a few seconds apart."""
        first = self.times.why_anew()
        self.now_s += 4.0
        return first or self.times.why_anew()

    def train(self, view: View, step_s: float, steps: int = 30) -> None:
        """Take over the view, and commit so many steps once it has settled."""
        self.times.took_over(view)
        self.now_s += SETTLED_S
        for _ in range(steps):
            self.now_s += step_s
            self.times.committed()


def view_of(stage_counts: tuple[int, ...], planned_ms: int, **changes: object) -> View:
    found = snapshot([Peer()] * 2, workload_of(run_spec(**changes)))
    plan = fixed_plan(found, stage_counts)
    return View(found, msgspec.structs.replace(plan, predicted_step_ns=planned_ms * MILLISECOND_NS))


ALONE, TOGETHER = view_of((1,), 1000), view_of((2,), 500)


def test_steps_as_planned_are_no_reason() -> None:
    clock = Clock()
    clock.train(ALONE, 1.0)
    clock.train(TOGETHER, 0.7)
    assert clock.asked() is None


def test_steps_half_as_long_again_as_planned_are_once() -> None:
    clock = Clock()
    clock.train(TOGETHER, 0.8)
    reason = clock.asked()
    assert reason is not None and "planned" in reason
    clock.times.took_over(TOGETHER)
    assert clock.asked() is None, "nothing is new"
    clock.train(TOGETHER, 0.8)
    clock.times.took_over(TOGETHER)
    assert clock.asked() is None
    clock.train(TOGETHER, 0.8, steps=int(FORGOTTEN_S / 0.8) + 1)
    assert clock.asked() is not None, "a while later it may be otherwise"


def test_one_of_the_members_that_see_it_asks() -> None:
    first, second = Clock(), Clock()
    for clock in (first, second):
        clock.train(TOGETHER, 0.8)
    assert second.times.why_anew() is None, "others are given a moment to see it"
    assert first.asked() is not None
    second.times.took_over(TOGETHER)
    assert second.asked() is None, "that plan was made anew a moment ago"


def test_few_steps_say_nothing() -> None:
    clock = Clock()
    clock.train(TOGETHER, 5.0, steps=9)
    assert clock.asked() is None
    assert clock.times.told() == ()


def test_a_gain_that_does_not_come_is_taken_back() -> None:
    clock = Clock()
    clock.train(ALONE, 0.6)
    clock.train(TOGETHER, 0.7)
    reason = clock.asked()
    assert reason is not None and "taken back" in reason
    assert {plan.step_ns // MILLISECOND_NS for plan in clock.times.told()} <= {599, 600, 699, 700}


@pytest.mark.parametrize("step_s", [60.0, 600.0])
def test_a_gain_that_does_not_come_is_taken_back_however_long_steps_take(step_s: float) -> None:
    """The measured times were forgotten after ten minutes, before a new plan had shown its time."""
    clock = Clock()
    clock.train(view_of((1,), int(1000 * step_s)), step_s, steps=12)
    clock.train(view_of((2,), int(500 * step_s)), 1.4 * step_s, steps=12)
    assert "is taken back" in (clock.asked() or "")
    assert len(clock.times.told()) == 2


def test_reasons_come_ever_less_often() -> None:
    clock, asked_s = Clock(), []
    plans = [view_of(counts, 100) for counts in ((1,), (2,), (1, 1))]
    while clock.now_s < 2000:
        for view in plans:
            clock.train(view, 1.0, steps=12)
            if clock.asked() is not None:
                asked_s.append(clock.now_s)
    pauses = [after - before for before, after in pairwise(asked_s)]
    assert min(pauses) >= 60
    assert len(asked_s) <= 7


MUON = {"peak_learning_rate": 3e-3, "kind": "muon"}


@pytest.mark.parametrize(
    ("changes", "forwards", "updates"),
    [
        ({}, 1, 0),
        ({"compute": {"recompute": "always"}}, 2, 0),
        ({"optimizer": MUON}, 1, 1),
        ({"optimizer": MUON, "sync": {"mode": "local", "inner_steps": 2}}, 1, 2),
    ],
)
def test_a_device_is_stated_as_slow_as_it_is_seen_to_be(
    changes: dict, forwards: int, updates: int
) -> None:
    """A device whose stage recomputes, or updates by Muon, stated itself a third slower than it
    is."""
    alone = view_of((1,), 1000, **changes)
    pace, device, work = DevicePace(), alone.snapshot.records[0].device, alone.snapshot.workload
    count = alone.plan.pipelines[0].microbatch_count
    layers = (device.embedding, device.block, device.head)
    said_ns = count * sum(
        (forwards * layer.forward_ns + layer.backward_ns)
        * (work.block_count if layer is device.block else 1)
        for layer in layers
    )
    once_ns = work.block_count * device.block.forward_ns * work.block_update_ppm // 1_000_000
    said_ns += updates * once_ns
    for factor, expected in ((1, None), (3, 3)):
        pace.took_over()
        for step in range(12):
            pace.committed(step * factor * said_ns)
        found = pace.seen(device, device, alone, name_of(0))
        assert (found is None) == (expected is None)
        if found is not None:
            assert found.block.forward_ns == expected * device.block.forward_ns
