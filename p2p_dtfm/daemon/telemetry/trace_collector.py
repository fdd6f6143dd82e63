"""What several peers did in the same steps, by one clock.

Each peer answers with times by its own wall clock; how far that is from this machine's is measured
with pings, at best known to half a round trip.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import TracedStep, TraceReply, TraceRequest
from p2p_dtfm.daemon.telemetry.step_recorder import RecordedStep, StepRecorder
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.peer_clock import ClockReading, read_clock
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.ports import now
from p2p_dtfm.web.state import SPAN_KINDS, Span, Timeline, TimelineLane

STEPS_LIMIT = 16
"""Steps of one request."""
REPLY_SPANS_LIMIT = 24_000
"""So many stay well under the limit of a control message."""
DEADLINE_S = 3.0
AT_ONCE = 32
CLOCK_KEPT_S = 60.0
TIMELINE_EVERY_S = 4.0
TIMELINE_PEERS_LIMIT = 32
SPANS_SHOWN = 1500
"""Spans of one peer on the dashboard; beyond that bars are thinner than pixels."""


APART_NS, APART_LENGTHS = 10_000_000_000, 3
"""Others' moments in a step may lie before this peer's first or after its last. They do so by no
more than this and so many times as long as the step took."""
DAY_NS = 86_400_000_000_000


@dataclass(frozen=True)
class PeerTrace:
    """Steps of one peer, by this machine's wall clock in nanoseconds since 1970."""

    peer_id: str
    clock_error_ns: int
    steps: dict[int, tuple[Span, ...]]


class TraceCollector:
    """Answers others' requests for this peer's spans, and asks others for theirs."""

    def __init__(self, recorder: StepRecorder, messenger: Messenger, host: HostPort) -> None:
        self._recorder = recorder
        self._messenger = messenger
        self._host = host
        self._clocks: dict[str, tuple[float, ClockReading]] = {}

    def answer(self, request: TraceRequest) -> bytes:
        """The reply to another member. Raises `PeerFault`."""
        if not 1 <= request.count <= STEPS_LIMIT:
            raise PeerFault(f"asks for {counted(request.count, 'step')}")
        return encode(TraceReply(tuple(self._own(request))))

    def _own(self, request: TraceRequest) -> list[TracedStep]:
        recorded, spans_left, found = self._recorder, REPLY_SPANS_LIMIT, []
        wall_ns = now.wall_ns() - now.monotonic_ns()
        first = request.first_step
        if first is None:
            first = (recorded.newest or 0) - request.count + 1
        for held in recorded.steps(first, request.count):
            spans_left -= len(held.spans)
            if spans_left >= 0:
                found.append(_on_wall_clock(held, wall_ns))
        return found

    async def collect(
        self, peers: Sequence[str], first_step: int | None, count: int
    ) -> tuple[list[PeerTrace], list[str]]:
        """(what peers say of those steps, in the order of `peers`, and who did not say).

        Without a first step: the newest ones of each.
        """
        request = TraceRequest(first_step, min(count, STEPS_LIMIT))
        turns = asyncio.Semaphore(AT_ONCE)

        async def ask(peer_id: str) -> PeerTrace | None:
            async with turns:
                return await self._ask(peer_id, request)

        answers = await asyncio.gather(*map(ask, peers))
        missing = [peer for peer, answer in zip(peers, answers, strict=True) if answer is None]
        return [answer for answer in answers if answer is not None], missing

    async def _ask(self, peer_id: str, request: TraceRequest) -> PeerTrace | None:
        if peer_id == self._messenger.me:
            return PeerTrace(peer_id, 0, _by_step(self._own(request), 0))
        try:
            clock = await self._clock(peer_id)
            reply = await self._messenger.ask(peer_id, request, DEADLINE_S)
            steps = decode(reply, TraceReply).steps
            if len(steps) > request.count or abs(clock.offset_ns) >= DAY_NS:
                return None
            check_times(steps, peer_id)
        except (Unreachable, Refused, PeerFault):
            return None
        return PeerTrace(peer_id, clock.round_trip_ns // 2, _by_step(steps, clock.offset_ns))

    async def _clock(self, peer_id: str) -> ClockReading:
        """Raises `Unreachable`."""
        now_s = now.monotonic_s()
        held = self._clocks.get(peer_id)
        if held is None or now_s - held[0] > CLOCK_KEPT_S:
            held = (now_s, await read_clock(self._host, peer_id, DEADLINE_S))
            kept = {it: of for it, of in self._clocks.items() if now_s - of[0] <= CLOCK_KEPT_S}
            self._clocks = {**kept, peer_id: held}
        return held[1]

    async def keep_timeline(
        self,
        view: Callable[[], View | None],
        is_watched: Callable[[], bool],
        show: Callable[[Timeline], None],
    ) -> None:
        """While somebody watches, show the newest step of this peer's pipeline now and then."""
        shown: tuple[int, int] | None = None
        while True:
            await asyncio.sleep(TIMELINE_EVERY_S if shown else 1.0)
            present = view()
            if not is_watched() or present is None or not isinstance(present.plan, Plan):
                continue
            peers = _pipeline_of(present.plan, self._messenger.me)
            step = await self._newest_step(peers)
            if step is None or (present.id.number, step) == shown:
                continue
            traces, missing = await self.collect(peers, step, 1)
            show(timeline_of(step, traces, missing, self._messenger.me))
            shown = (present.id.number, step)

    async def _newest_step(self, peers: Sequence[str]) -> int | None:
        """The newest step that is over here; where this peer has no stage, the first peer's."""
        if self._messenger.me in peers:
            return self._recorder.newest
        trace = await self._ask(peers[0], TraceRequest(None, 1))
        return max(trace.steps, default=None) if trace else None


def _pipeline_of(plan: Plan, me: str) -> list[str]:
    place = plan.place_of(me)
    pipeline = plan.pipelines[place[0] if place else 0]
    return [stage.peer_id for stage in pipeline.stages][:TIMELINE_PEERS_LIMIT]


def peer_traces_json(plan: Plan, traces: Sequence[PeerTrace]) -> list[dict[str, Any]]:
    """As the local API tells it: a span is [kind, number, start_ns, end_ns]."""
    found = []
    for trace in traces:
        place, stage = plan.place_of(trace.peer_id), plan.stage_of(trace.peer_id)
        if place is None or stage is None:
            continue
        found.append(
            {
                "peer_id": trace.peer_id,
                "pipeline": place[0],
                "position": place[1],
                "layers": [stage.first_layer, stage.end_layer],
                "clock_error_ns": trace.clock_error_ns,
                "steps": {
                    step: [msgspec.to_builtins(span) for span in spans]
                    for step, spans in trace.steps.items()
                },
            }
        )
    return found


def timeline_of(
    step: int, traces: Sequence[PeerTrace], missing: Sequence[str], me: str = ""
) -> Timeline:
    """One step for the dashboard, from its first moment on.

    A peer may tell of hours before or after what `me`, or else most, have seen of the step. It
    would make a line of all others' bars, and so it counts as silent.
    """
    told = {trace.peer_id: trace.steps[step] for trace in traces if trace.steps.get(step)}
    near = _near(told, me)
    known = [(trace, told[trace.peer_id]) for trace in traces if trace.peer_id in near]
    silent = [trace.peer_id for trace in traces if trace.peer_id not in near]
    if not known:
        return Timeline(missing=(*missing, *silent))
    start_ns = min(span.start_ns for _, spans in known for span in spans)
    end_ns = max(span.end_ns for _, spans in known for span in spans)
    lanes = tuple(
        TimelineLane(
            trace.peer_id,
            tuple(
                Span(span.kind, span.number, span.start_ns - start_ns, span.end_ns - start_ns)
                for span in spans[-SPANS_SHOWN:]
            ),
            trace.clock_error_ns,
        )
        for trace, spans in known
    )
    duration_ns = max(1, end_ns - start_ns)  # all that is known may be of one moment
    return Timeline(step, duration_ns, lanes, (*missing, *silent))


def _near(told: Mapping[str, tuple[Span, ...]], me: str) -> set[str]:
    """The peers whose spans are of the same time as those of `me`, or else as most say. Where as
    many say something else, as one of two does, nobody knows who is right."""
    ends = {
        peer_id: (min(it.start_ns for it in spans), max(it.end_ns for it in spans))
        for peer_id, spans in told.items()
    }
    if not ends:
        return set()
    if me in ends:
        return {peer_id for peer_id, its in ends.items() if _is_within_reach(its, ends[me])}
    alike = [
        {
            other
            for other, its in ends.items()
            if _is_within_reach(its, own) and _is_within_reach(own, its)
        }
        for own in ends.values()
    ]
    most = max(map(len, alike))
    return set.intersection(*(group for group in alike if len(group) == most))


def _is_within_reach(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a first and a last moment are near those that `other` has seen."""
    first, last = other
    slack_ns = APART_NS + APART_LENGTHS * max(0, last - first)
    return first - slack_ns <= one[0] and one[1] <= last + slack_ns


def _on_wall_clock(held: RecordedStep, wall_ns: int) -> TracedStep:
    spans = tuple(
        Span(span.kind, span.number, span.start_ns + wall_ns, span.end_ns + wall_ns)
        for span in held.spans
    )
    return TracedStep(held.step, spans)


def check_times(steps: Sequence[TracedStep], peer_id: str) -> None:
    """Refuse times that would make a picture of all the others' unreadable."""
    now_ns = now.wall_ns()
    for span in (span for traced in steps for span in traced.spans):
        near = now_ns - DAY_NS < span.start_ns <= span.end_ns < now_ns + DAY_NS
        if not near or span.kind not in SPAN_KINDS:
            raise PeerFault(f"a {span.kind[:16]!r} of {span.end_ns - span.start_ns} ns", peer_id)


def _by_step(steps: Sequence[TracedStep], offset_ns: int) -> dict[int, tuple[Span, ...]]:
    return {
        traced.step: tuple(
            Span(span.kind, span.number, span.start_ns - offset_ns, span.end_ns - offset_ns)
            for span in traced.spans
        )
        for traced in steps
    }
