"""How slow a peer is seen to be: by when its parts come, less their way, and for how long."""

import msgspec
import pytest

from p2p_dtfm.core.audit.believed_speeds import believed, pace_of
from p2p_dtfm.core.planner.planner import fixed_plan
from p2p_dtfm.core.protocol.facts.seen_paces import is_possible
from p2p_dtfm.core.protocol.measured_plans import STEPS_ENOUGH
from p2p_dtfm.core.protocol.records import LAYER_LIMIT_NS, LayerTiming, Link
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.telemetry.seen_paces import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SeenPaces,
    pace_text,
    pause_s,
)
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot

ME, OTHER, THIRD = name_of(0), name_of(1), name_of(2)
SECOND_NS = 10**9
MIB = 1 << 20


def view_of(stages: tuple[int, ...], bytes_per_s: int = 1 << 40) -> View:
    link = Link(round_trip_ns=0, bytes_per_s=bytes_per_s)
    found = snapshot([Peer(30_000_000)] * 3, workload_of(run_spec(batch=BATCH)), link=link)
    return View(found, msgspec.structs.replace(fixed_plan(found, stages), predicted_step_ns=1))


BATCH = {"global_batch": 24, "microbatch": 2}
REPLICAS, PIPELINE, ALONE = view_of((1, 1, 1)), view_of((1, 2)), view_of((1,))
WORK_NS = 4 * (4 * 30_000_000 + 2 * 3_000_000)
"""Time of each of three peers, by its record."""


class Clock:
    def __init__(self, me: str = ME) -> None:
        self.now_ns = 0
        self.paces = SeenPaces(me, lambda: self.now_ns)
        self.step = 0

    def train(
        self, took_ns: int, steps: int = STEPS_ENOUGH, size_bytes: int = 0, by: str = OTHER
    ) -> None:
        """In each step the first part comes so long after the beginning."""
        for _ in range(steps):
            self.paces.begins(self.step)
            self.now_ns += took_ns
            self.paces.came(by, self.step, size_bytes)
            self.paces.came(by, self.step, 9 * size_bytes)
            self.now_ns += SECOND_NS // 10
            self.paces.came(THIRD, self.step - 1, 0)
            self.paces.committed()
            self.step += 1


def told(clock: Clock, is_late: bool = True) -> dict[str, int]:
    clock.paces.look(is_late)
    return clock.paces.told()


def test_who_is_three_times_as_slow_as_it_says_is_told_of() -> None:
    clock = Clock()
    clock.paces.took_over(REPLICAS)
    clock.train(3 * WORK_NS, STEPS_ENOUGH - 1)
    assert told(clock) == {}, "few steps say nothing"
    clock.train(3 * WORK_NS, 1)
    assert told(clock, is_late=False) == {}, "nobody waits for it"
    assert told(clock) == {
        OTHER: 3 * pace_of(REPLICAS.snapshot.records[1].device, REPLICAS.snapshot.workload)
    }


def test_who_says_that_other_layers_take_years_makes_nobody_say_what_no_record_may() -> None:
    """A peer that repeated this was refused by all, and out: the liar's own figure was in its
    record."""
    found = REPLICAS.snapshot
    long = (LayerTiming(LAYER_LIMIT_NS - 1, LAYER_LIMIT_NS - 1),) * 256
    liar = found.records[1]
    liar = msgspec.structs.replace(liar, device=msgspec.structs.replace(liar.device, listed=long))
    found = msgspec.structs.replace(found, records=(found.records[0], liar, found.records[2]))
    clock = Clock()
    clock.paces.took_over(View(found, REPLICAS.plan))
    clock.train(1 << 50)
    assert is_possible(told(clock))
    taken = believed(
        msgspec.structs.replace(
            found,
            present=REPLICAS.plan,
            records=tuple(
                it if it.peer_id == OTHER else msgspec.structs.replace(it, paces=told(clock))
                for it in found.records
            ),
        )
    )
    assert taken.record(OTHER).device.block.forward_ns > 1000 * liar.device.block.forward_ns


@pytest.mark.parametrize("percent", [50, 100, 145])
def test_who_is_nearly_as_fast_as_it_says_is_not(percent: int) -> None:
    clock = Clock()
    clock.paces.took_over(REPLICAS)
    clock.train(WORK_NS * percent // 100)
    assert told(clock) == {}


def test_what_the_line_takes_is_not_its_devices_doing() -> None:
    """Two other peers get as much at the same time."""
    clock, line = Clock(), 10 * MIB
    clock.paces.took_over(view_of((1, 1, 1), line))
    clock.train(WORK_NS + 2 * SECOND_NS, size_bytes=line)
    assert told(clock) == {}
    clock.train(3 * WORK_NS + 2 * SECOND_NS, size_bytes=line)
    assert told(clock).keys() == {OTHER}


def test_in_a_pipeline_nobody_knows_who_was_waited_for() -> None:
    clock = Clock()
    clock.paces.took_over(PIPELINE)
    clock.train(9 * WORK_NS)
    assert told(clock) == {}


def test_who_has_all_alone_takes_what_its_steps_take() -> None:
    clock = Clock(OTHER)
    clock.paces.took_over(ALONE)
    for step_ns in [1, *[0, 4 * 3 * WORK_NS] * (STEPS_ENOUGH // 2 + 1)]:
        clock.now_ns += step_ns
        clock.paces.committed()
    device = ALONE.snapshot.records[0].device
    assert told(clock) == {ME: 2 * pace_of(device, ALONE.snapshot.workload)}, (
        "two steps are told of at once"
    )


def test_it_is_told_of_until_it_is_as_fast_and_then_there_is_a_reason_to_plan() -> None:
    clock = Clock()
    clock.paces.took_over(REPLICAS)
    clock.train(3 * WORK_NS)
    before = told(clock)
    clock.train(3 * WORK_NS * 9 // 10)
    assert told(clock, is_late=False) == before, "a little less is no news"
    assert clock.paces.improved_peers(before) == []
    clock.train(WORK_NS)
    assert told(clock) == {}
    assert clock.paces.improved_peers(before) == [OTHER] and clock.paces.improved_peers({}) == []


def test_who_has_no_work_any_more_is_tried_again_ever_later() -> None:
    clock, waited_s = Clock(), list[float]()
    for _ in range(6):
        clock.paces.took_over(REPLICAS)
        clock.train(3 * WORK_NS)
        assert told(clock)
        clock.paces.took_over(PIPELINE)
        since_ns = clock.now_ns
        while told(clock):
            clock.now_ns += SECOND_NS
        waited_s.append((clock.now_ns - since_ns) / SECOND_NS)
    assert waited_s == [60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    assert (pause_s(0), pause_s(99)) == (FIRST_PAUSE_S, LONGEST_PAUSE_S)


def test_where_steps_take_long_it_is_tried_again_after_forty() -> None:
    """A peer that was tried again after a minute had its work back before a step was done without
    it."""
    clock = Clock()
    clock.paces.took_over(REPLICAS)
    clock.train(3 * WORK_NS)
    assert told(clock)
    plan = msgspec.structs.replace(PIPELINE.plan, predicted_step_ns=60 * SECOND_NS)
    clock.paces.took_over(View(PIPELINE.snapshot, plan))
    since_ns = clock.now_ns
    while told(clock):
        clock.now_ns += 10 * SECOND_NS
    assert clock.now_ns - since_ns == 40 * 60 * SECOND_NS
    assert pause_s(99, 1.0) == LONGEST_PAUSE_S


def test_the_log_says_in_words_who_is_slower_than_it_says() -> None:
    """The log said "young-moose: 36962722 ns (0: as it says)"."""
    text = "x is slower than it says, as seen here: it takes 37.0 ms for a layer of each kind"
    assert pace_text("x", 36_962_722) == text
    assert pace_text("x", None) == "x is as fast as it says again, as seen here"
