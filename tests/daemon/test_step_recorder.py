"""A peer's work in its last steps, and how others' answers are put on one clock."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.daemon.peers.wire import TracedStep, TraceReply, TraceRequest
from p2p_dtfm.daemon.telemetry import step_recorder, trace_collector
from p2p_dtfm.daemon.telemetry.step_recorder import STEPS_KEPT, StepRecorder
from p2p_dtfm.daemon.telemetry.trace_collector import (
    DAY_NS,
    STEPS_LIMIT,
    PeerTrace,
    TraceCollector,
    check_times,
    timeline_of,
)
from p2p_dtfm.net.libp2p.peer_clock import ClockReading
from p2p_dtfm.ports import now
from p2p_dtfm.web.state import Span

HOUR_NS = 3600 * 10**9


def recorded(*steps: int) -> StepRecorder:
    recorder = StepRecorder()
    for step in steps:
        recorder.begin(step)
        recorder.timed("forward", 0, lambda: None)()
        with recorder.span("wait"):
            pass
        recorder.end()
    return recorder


def test_spans_follow_one_another() -> None:
    (held,) = recorded(4).steps(4, 1)
    assert [span.kind for span in held.spans] == ["forward", "wait"]
    assert held.spans[0].start_ns <= held.spans[0].end_ns <= held.spans[1].start_ns


def test_only_late_steps_that_are_over_are_given() -> None:
    recorder = recorded(*range(100))
    assert recorder.newest == 99
    assert len(recorder.steps(0, 100)) == STEPS_KEPT
    recorder.begin(100)
    assert recorder.newest == 99 and not recorder.steps(100, 1)


def test_a_repeated_step_replaces_itself() -> None:
    recorder = recorded(5, 6)
    recorder.begin(6)
    assert recorder.newest == 5
    recorder.begin(5)
    recorder.end()
    assert [held.step for held in recorder.steps(0, 10)] == [5]
    assert not recorder.steps(5, 1)[0].spans


def test_what_fails_is_not_recorded_and_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = StepRecorder()
    recorder.begin(0)
    with pytest.raises(ZeroDivisionError), recorder.span("forward"):
        1 / 0  # noqa: B018
    monkeypatch.setattr(step_recorder, "SPANS_LIMIT", 3)
    for _ in range(9):
        recorder.timed("backward", 1, int)()
    recorder.end()
    assert len(recorder.steps(0, 1)[0].spans) == 3


def test_an_answer_holds_the_steps_asked_for() -> None:
    collector = TraceCollector(recorded(*range(20)), None, None)  # type: ignore[arg-type]

    def steps(request: TraceRequest) -> list[int]:
        return [traced.step for traced in decode(collector.answer(request), TraceReply).steps]

    assert steps(TraceRequest(18, 5)) == [18, 19]
    assert steps(TraceRequest(None, 3)) == [17, 18, 19]
    assert steps(TraceRequest(400, 1)) == []
    for count in (0, -1, STEPS_LIMIT + 1):
        with pytest.raises(PeerFault):
            collector.answer(TraceRequest(0, count))


def test_a_timeline_begins_with_its_first_span_and_names_the_silent() -> None:
    first = PeerTrace("a", 0, {7: (Span("forward", 0, 1_000, 2_000),)})
    second = PeerTrace("b", 50, {7: (Span("wait", 0, 1_500, 4_000),)})
    without = PeerTrace("c", 50, {6: (Span("wait", 0, 0, 1),)})
    timeline = timeline_of(7, [first, second, without], ["d"])
    assert timeline.step == 7 and timeline.duration_ns == 3_000
    assert [lane.spans[0].start_ns for lane in timeline.lanes] == [0, 500]
    assert timeline.missing == ("d", "c")
    assert timeline_of(8, [first], []).step is None


@pytest.mark.parametrize("me", ["me", ""])
def test_who_tells_of_another_hour_does_not_flatten_the_others(me: str) -> None:
    """Any time within a day of now was believed: one liar in a pipeline made a line of all bars."""
    second, hour = 10**9, 3600 * 10**9
    mine = PeerTrace("me", 0, {7: (Span("forward", 0, hour, hour + second),)})
    late = PeerTrace("late", 0, {7: (Span("commit", 0, hour, hour + 8 * second),)})
    liar = PeerTrace("liar", 0, {7: (Span("wait", 0, hour, 9 * hour),)})
    early = PeerTrace("early", 0, {7: (Span("wait", 0, 0, hour),)})
    timeline = timeline_of(7, [mine, late, liar, early], ["gone"], me)
    assert [lane.peer_id for lane in timeline.lanes] == ["me", "late"]
    assert timeline.duration_ns == 8 * second and timeline.missing == ("gone", "liar", "early")


@pytest.mark.parametrize(
    "liar",
    [Span("wait", 0, 0, 0), Span("wait", 0, 0, 9 * HOUR_NS), Span("wait", 0, HOUR_NS, HOUR_NS)],
)
def test_of_two_that_contradict_each_other_neither_is_shown(liar: Span) -> None:
    """A spare watched a pipeline of two. The member with the earlier times was believed alone, and
    one span without any length kept the page drawing its axis for ever."""
    honest = PeerTrace("honest", 0, {7: (Span("forward", 0, HOUR_NS, HOUR_NS + 60 * 10**9),)})
    timeline = timeline_of(7, [honest, PeerTrace("liar", 0, {7: (liar,)})], [])
    assert timeline.step is None and timeline.missing == ("honest", "liar")


def test_a_timeline_of_one_moment_takes_time() -> None:
    alone = PeerTrace("alone", 0, {7: (Span("wait", 0, HOUR_NS, HOUR_NS),)})
    timeline = timeline_of(7, [alone], [])
    assert (timeline.step, timeline.duration_ns) == (7, 1)


@pytest.mark.parametrize(
    "span",
    [
        Span("forward", 0, 5, 9),
        Span("forward", 0, 1 << 62, (1 << 62) + 1),
        Span("forward", 0, -5, 1),
        Span("sleep", 0, 0, 0),
    ],
)
def test_times_of_another_age_are_refused(span: Span) -> None:
    with pytest.raises(PeerFault):
        check_times([TracedStep(0, (span,))], "peer")


@pytest.mark.parametrize(
    ("offset_ns", "count", "is_shown"),
    [(5, 1, True), (10**20, 1, False), (-DAY_NS, 1, False), (5, STEPS_LIMIT + 1, False)],
)
def test_whose_clock_or_answer_cannot_be_is_not_shown(
    offset_ns: int, count: int, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a clock moved all others so far that the page's state could not be encoded. A dictionary
    was made of an answer with as many steps as there is room for."""

    async def read_clock(host: object, peer_id: str, deadline_s: float) -> ClockReading:
        return ClockReading(offset_ns, 10)

    async def ask(peer_id: str, request: TraceRequest, deadline_s: float) -> bytes:
        span = Span("forward", 0, now.wall_ns(), now.wall_ns() + 1)
        return encode(TraceReply(tuple(TracedStep(step, (span,)) for step in range(count))))

    messenger: Any = SimpleNamespace(me="me", ask=ask)
    monkeypatch.setattr(trace_collector, "read_clock", read_clock)
    collector = TraceCollector(recorded(0, 1), messenger, None)  # type: ignore[arg-type]
    traces, missing = asyncio.run(collector.collect(["me", "liar"], 0, 1))
    assert [trace.peer_id for trace in traces] == (["me", "liar"] if is_shown else ["me"])
    assert missing == ([] if is_shown else ["liar"])
    msgspec.json.encode(timeline_of(0, traces, missing))
