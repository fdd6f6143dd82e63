"""Daemon, planner and simulator choose the next tasklet by one rule."""

import ast
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import p2p_dtfm
from p2p_dtfm.core.cost_model.pipeline_timing import (
    Hooks,
    PipelinesAtWork,
    StageAtWork,
    StageTiming,
    TimedPipeline,
    stage_ends_ns,
)
from p2p_dtfm.core.schedule.pipeline_order import StageOrder
from p2p_dtfm.core.schedule.tasklets import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Tasklet,
    TaskletKind,
    next_tasklet,
)
from p2p_dtfm.core.virtual.virtual_time import VirtualTime

Ran = list[list[Tasklet]]
"""What each stage of a pipeline ran, in order."""


@pytest.mark.parametrize("backward_was_last", [False, True])
@pytest.mark.parametrize("weight", [False, True])
def test_forwards_and_backwards_take_turns_and_weights_fill_gaps(
    weight: bool, backward_was_last: bool
) -> None:
    both = FORWARD if backward_was_last else BACKWARD
    assert next_tasklet(True, True, weight, backward_was_last) is both
    assert next_tasklet(True, False, weight, backward_was_last) is FORWARD
    assert next_tasklet(False, True, weight, backward_was_last) is BACKWARD
    neither = next_tasklet(False, False, weight, backward_was_last)
    assert neither is (WEIGHT if weight else None)


stages = st.lists(
    st.builds(
        StageTiming,
        forward_ns=st.integers(1, 9),
        backward_ns=st.integers(4, 20),
        in_flight=st.integers(1, 6),
        out_latency_ns=st.integers(0, 30),
        back_latency_ns=st.integers(0, 30),
        weight_ns=st.integers(0, 3),
    ),
    min_size=1,
    max_size=5,
).map(tuple)


@settings(max_examples=120, deadline=None)
@given(stages, st.integers(1, 12))
def test_the_daemon_runs_what_is_timed(timings: tuple[StageTiming, ...], microbatches: int) -> None:
    assert by_daemons(timings, microbatches) == by_the_engine(timings, microbatches)


def by_the_engine(timings: tuple[StageTiming, ...], microbatches: int) -> Ran:
    time, ran = VirtualTime(), [list[Tasklet]() for _ in timings]
    done: list[int] = []

    def send(origin: StageAtWork, to: StageAtWork, arrived) -> None:
        time.at(time.now_ns + latency_ns(timings, origin.position, to.position), arrived, to)

    def began(stage: StageAtWork, kind: TaskletKind, count: int, _: int) -> None:
        before = [item.kind for item in ran[stage.position]].count(kind)
        ran[stage.position] += [Tasklet(kind, before + n) for n in range(count)]

    hooks = Hooks(lambda stage: done.append(stage.position), began=began)
    pipeline = TimedPipeline(tuple(range(len(timings))), timings, microbatches)
    PipelinesAtWork(time, [pipeline], send, hooks)
    time.run()
    assert sorted(done) == list(range(len(timings)))
    return ran


def by_daemons(timings: tuple[StageTiming, ...], microbatches: int) -> Ran:
    """The same pipeline, run in the order that daemons keep."""
    time, ran = VirtualTime(), [list[Tasklet]() for _ in timings]
    last = len(timings) - 1
    orders = [
        StageOrder(
            range(microbatches),
            timing.in_flight,
            makes_inputs=at == 0,
            makes_losses=at == last,
            splits=timing.weight_ns > 0,
        )
        for at, timing in enumerate(timings)
    ]
    busy = [False] * len(timings)

    def pick(at: int) -> None:
        tasklet = None if busy[at] else orders[at].next()
        if tasklet is None:
            return
        busy[at], timing = True, timings[at]
        ran[at].append(tasklet)
        spent = {
            FORWARD: timing.forward_ns,
            BACKWARD: timing.backward_ns - timing.weight_ns,
            WEIGHT: timing.weight_ns,
        }
        time.at(time.now_ns + spent[tasklet.kind], ended, (at, tasklet))

    def ended(what: tuple[int, Tasklet]) -> None:
        at, tasklet = what
        busy[at] = False
        to = at + {FORWARD: 1, BACKWARD: -1, WEIGHT: len(timings)}[tasklet.kind]
        if 0 <= to <= last:
            time.at(time.now_ns + latency_ns(timings, at, to), arrived, (to, tasklet))
        pick(at)

    def arrived(what: tuple[int, Tasklet]) -> None:
        at, tasklet = what
        arrive = orders[at].input_arrived
        (arrive if tasklet.kind is FORWARD else orders[at].gradient_arrived)(tasklet.microbatch)
        pick(at)

    pick(0)
    time.run()
    assert all(order.done for order in orders)
    return ran


def latency_ns(timings: tuple[StageTiming, ...], origin: int, to: int) -> int:
    return timings[origin].out_latency_ns if to > origin else timings[to].back_latency_ns


def test_a_lone_pipeline_ends_when_its_first_stage_has_all_gradients_back() -> None:
    """Worked out by hand: two stages that alternate, over a link that takes 10 each way."""
    stages = (
        StageTiming(2, 4, 1, out_ns=1, out_latency_ns=9, back_ns=1, back_latency_ns=9),
        StageTiming(3, 6, 1),
    )
    once = 2 + 10 + 3 + 6 + 10 + 4
    assert stage_ends_ns(stages, 1) == (once, once - 14)
    assert stage_ends_ns(stages, 3) == (3 * once, 3 * once - 14)


def test_a_pipeline_drains_behind_each_inner_step() -> None:
    """Groups are as equal as whole numbers allow, and the first stage is the last to end each."""
    stages = (
        StageTiming(2, 4, 4, out_ns=1, out_latency_ns=9, back_ns=1, back_latency_ns=9),
        StageTiming(3, 6, 4, weight_ns=3),
    )
    four, three = stage_ends_ns(stages, 4), stage_ends_ns(stages, 3)
    assert stage_ends_ns(stages, 11, 3) == (2 * four[0] + three[0], three[0] + four[0] + four[1])
    assert stage_ends_ns(stages, 4, 1) == four
    alone = stage_ends_ns(stages, 1)
    assert stage_ends_ns(stages, 2, 5) == (2 * alone[0], alone[0] + alone[1]), "no empty ones"


WHAT_RAN_LAST = "was_last"


def test_nobody_else_chooses() -> None:
    """One place decides what ran last; others note it and hand it on."""
    package = Path(p2p_dtfm.__file__).parent
    places = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        if WHAT_RAN_LAST in (source := path.read_text())  # parsing all takes seconds
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.BoolOp | ast.Compare)
        and any(map(_is_what_ran_last, itertools.chain.from_iterable(_decides(node))))
    ]
    assert {place.partition(":")[0] for place in places} == {"core/schedule/tasklets.py"}, places


def _decides(node: ast.AST):
    """What the outcome of a branch depends on."""
    tests = [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else [node]
    return [ast.walk(test) for test in tests]


def _is_what_ran_last(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return WHAT_RAN_LAST in name
