"""Pipelines at work in virtual time, tasklet by tasklet: one engine for planner and simulator.

A stage computes and sends at the same time, and waits for data only. Tasklets run in the order of
`schedule.tasklets`. The caller says how tensors travel and what follows on a stage's end:

    stage_ends_ns    (here) one pipeline alone: what `pipeline_cost` puts in formulas. The formulas
                     are exact to a thousandth where every stage may hold as many microbatches as
                     it wants. Where memory allows fewer, or two links share an uplink, they are
                     off by up to a tenth; so the few placements left to choose from are timed.
    step_timing      all pipelines over the links of a swarm, and what comes after them
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2p_dtfm.core.schedule.inner_steps import group_sizes
from p2p_dtfm.core.schedule.tasklets import BACKWARD, FORWARD, TaskletKind, next_tasklet
from p2p_dtfm.core.virtual.virtual_time import TooLate, VirtualTime


@dataclass(frozen=True, slots=True)
class StageTiming:
    """One stage and its hop to the next (zeros at the last), for one microbatch.

    The hop and the shared limits count only where a pipeline is timed alone.
    """

    forward_ns: int
    backward_ns: int
    in_flight: int
    out_ns: int = 0
    """Transmission of the activation, and the handling of a message."""
    out_latency_ns: int = 0
    back_ns: int = 0
    """Transmission of the gradient, from the next stage to this one."""
    back_latency_ns: int = 0
    uplink_ns: int = 0
    """How long one tensor takes the peer's shared uplink; 0: not limited."""
    downlink_ns: int = 0
    weight_ns: int = 0
    """The part of the backward that is left for when nothing else can run; 0: none."""
    update_ns: int = 0
    """The update of the parameters, before the step's first forward and between inner steps."""
    out_bytes: int = 0
    """Bytes of the activation on the wire; 0: as all boundary tensors of the step."""
    back_bytes: int = 0
    """Bytes of the gradient that the next stage sends back."""


@dataclass(frozen=True, slots=True)
class TimedPipeline:
    """A pipeline's peers in order, what each does for a microbatch, and how many there are."""

    peers: tuple[int, ...]
    stages: tuple[StageTiming, ...]
    microbatches: int
    inner_steps: int = 0
    """Inner steps that share the microbatches, one after the other; 0: there are none."""


class StageAtWork:
    """One stage at work. Everything arrives in the order of the microbatches."""

    __slots__ = ("backward_was_last", "backwards", "busy", "forwards", "forwards_begun",
                 "group_end", "group_left", "held", "in_flight", "later_groups", "left",
                 "microbatches", "next", "owed", "peer", "pipeline", "position", "previous",
                 "timing")  # fmt: skip

    def __init__(
        self,
        place: tuple[int, int],
        peer: int,
        timing: StageTiming,
        microbatches: int,
        inner_steps: int = 0,
    ) -> None:
        self.pipeline, self.position = place
        self.peer = peer
        self.timing = timing
        self.in_flight = timing.in_flight
        self.microbatches = microbatches
        self.forwards = self.backwards = 0
        """Forwards and backwards whose input is here and that have not begun yet."""
        self.forwards_begun = 0
        self.held = 0
        """Microbatches between the start of their forward and the end of their backward."""
        self.left = microbatches
        """Backwards that have not ended."""
        groups = group_sizes(microbatches, inner_steps)
        self.group_end = self.group_left = groups[0]
        """The end of the inner step's microbatches, and its part of `left`."""
        self.later_groups = groups[:0:-1]
        """The sizes of later inner steps, the next one last."""
        self.owed = 0
        """Backwards whose WEIGHT part is left to do."""
        self.busy = self.backward_was_last = False
        self.previous: StageAtWork | None = None
        self.next: StageAtWork | None = None


Event = Callable[[StageAtWork], None]
Choose = Callable[[StageAtWork], TaskletKind | None]
Began = Callable[[StageAtWork, TaskletKind, int, int], None]
Send = Callable[[StageAtWork, StageAtWork, Event], None]
"""`send(origin, to, arrived)` sends a tensor to a neighbour; `arrived(to)` when it is there."""


def in_turns(stage: StageAtWork) -> TaskletKind | None:
    """1F1B, with as many microbatches in flight as the plan says."""
    return next_tasklet(
        stage.forwards > 0
        and stage.held < stage.in_flight
        and stage.forwards_begun < stage.group_end,
        stage.backwards > 0,
        stage.owed > 0,
        stage.backward_was_last,
    )


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the caller is told of the work. Times may lie ahead: what has begun also ends."""

    done: Event
    """Called when all gradients of a stage are whole."""
    last_part: Callable[[StageAtWork, int, int], None] | None = None
    """`(stage, count, end_ns)`: the last part of the stage's last `count` microbatches has begun;
    layers become final during it."""
    began: Began | None = None
    """`(stage, kind, count, end_ns)`: a tasklet has begun, or `count` weights at once."""


class PipelinesAtWork:
    """The pipelines of a step; `time.run()` does the rest."""

    def __init__(
        self,
        time: VirtualTime,
        pipelines: Sequence[TimedPipeline],
        send: Send,
        hooks: Hooks,
        choose: Choose = in_turns,
    ) -> None:
        self._time = time
        self._send = send
        self._done, self._last_part, self._began = hooks.done, hooks.last_part, hooks.began
        self._choose = choose
        for first in [_chained(*each) for each in enumerate(pipelines)]:
            first.forwards = first.group_end
            stage: StageAtWork | None = first
            while stage is not None:
                self._update(stage)
                stage = stage.next
            if not first.busy:
                self._pick(first)

    def _pick(self, stage: StageAtWork) -> None:
        """Begin the next tasklet, if there is one."""
        kind = self._choose(stage)
        if kind is None:
            return
        timing, count, is_last = stage.timing, 1, False
        stage.busy = True
        ended: Event
        if kind is FORWARD:
            stage.forwards -= 1
            stage.forwards_begun += 1
            stage.held += 1
            stage.backward_was_last = False
            duration_ns, ended = timing.forward_ns, self._forward_ended
        elif kind is BACKWARD:
            stage.backwards -= 1
            stage.backward_was_last = True
            duration_ns, ended = timing.backward_ns - timing.weight_ns, self._backward_ended
            is_last = stage.left == 1 and not timing.weight_ns
        else:
            is_last = not stage.left
            # at the end, all weights that are left, layer by layer
            count = 1 if stage.group_left else stage.owed
            stage.owed -= count
            stage.held -= count - 1
            duration_ns, ended = count * timing.weight_ns, self._weights_ended
        end_ns = self._time.now_ns + duration_ns
        if end_ns > self._time.limit_ns:
            raise TooLate
        if self._began is not None:
            self._began(stage, kind, count, end_ns)
        if is_last and self._last_part is not None:
            self._last_part(stage, count, end_ns)
        self._time.at(end_ns, ended, stage)

    def _update(self, stage: StageAtWork) -> None:
        """Begins the update of the parameters, before whatever comes next."""
        if stage.timing.update_ns:
            stage.busy = True
            self._time.at(self._time.now_ns + stage.timing.update_ns, self._updated, stage)

    def _updated(self, stage: StageAtWork) -> None:
        stage.busy = False
        self._pick(stage)

    def _forward_ended(self, stage: StageAtWork) -> None:
        stage.busy = False
        if stage.next is None:
            stage.backwards += 1
        else:
            self._send(stage, stage.next, self._input_arrived)
        self._pick(stage)

    def _backward_ended(self, stage: StageAtWork) -> None:
        stage.busy = False
        stage.left -= 1
        stage.group_left -= 1
        if stage.timing.weight_ns:
            stage.owed += 1
        else:
            stage.held -= 1
        if stage.previous is not None:
            self._send(stage, stage.previous, self._gradient_arrived)
        self._go_on(stage)

    def _weights_ended(self, stage: StageAtWork) -> None:
        stage.busy = False
        stage.held -= 1
        self._go_on(stage)

    def _go_on(self, stage: StageAtWork) -> None:
        if not stage.group_left and not stage.owed:
            self._group_done(stage)
        if not stage.busy:
            self._pick(stage)

    def _group_done(self, stage: StageAtWork) -> None:
        """The step, or the inner step, is done here; the first stage then begins the next."""
        if not stage.left:
            self._done(stage)
            return
        size = stage.later_groups.pop()
        stage.group_left = size
        stage.group_end += size
        if stage.previous is None:
            stage.forwards += size
        self._update(stage)

    def _input_arrived(self, stage: StageAtWork) -> None:
        stage.forwards += 1
        if not stage.busy:
            self._pick(stage)

    def _gradient_arrived(self, stage: StageAtWork) -> None:
        stage.backwards += 1
        if not stage.busy:
            self._pick(stage)


def _chained(number: int, pipeline: TimedPipeline) -> StageAtWork:
    stages = [
        StageAtWork((number, position), peer, timing, pipeline.microbatches, pipeline.inner_steps)
        for position, (peer, timing) in enumerate(zip(pipeline.peers, pipeline.stages, strict=True))
    ]
    for here, there in pairwise(stages):
        here.next, there.previous = there, here
    return stages[0]


def stage_ends_ns(
    stages: tuple[StageTiming, ...], microbatches: int, inner_steps: int = 0
) -> tuple[int, ...]:
    """When each stage has done all its backwards, counted from the start of the step."""
    time = VirtualTime()
    ends: dict[int, int] = {}

    def done(stage: StageAtWork) -> None:
        ends[stage.position] = time.now_ns

    pipeline = TimedPipeline(tuple(range(len(stages))), stages, microbatches, inner_steps)
    PipelinesAtWork(time, (pipeline,), _Links(time, len(stages)).send, Hooks(done))
    time.run()
    return tuple(ends[position] for position in range(len(stages)))


class _Links:
    """The links of one pipeline. Each link, uplink and downlink carries one tensor at a time."""

    def __init__(self, time: VirtualTime, count: int) -> None:
        self._time = time
        self._out_ns, self._back_ns = [0] * count, [0] * count
        """Until when a stage's links to the next stage and to the one before are taken."""
        self._up_ns, self._down_ns = [0] * count, [0] * count

    def send(self, origin: StageAtWork, to: StageAtWork, arrived: Event) -> None:
        here, there = origin.position, to.position
        start_ns = now_ns = self._time.now_ns
        if uplink_ns := origin.timing.uplink_ns:
            start_ns = max(now_ns, self._up_ns[here])
            self._up_ns[here] = start_ns + uplink_ns
        if there > here:
            hop, busy_ns = origin.timing, self._out_ns
            sent_ns, latency_ns = hop.out_ns, hop.out_latency_ns
        else:
            hop, busy_ns = to.timing, self._back_ns
            sent_ns, latency_ns = hop.back_ns, hop.back_latency_ns
        end_ns = busy_ns[here] = max(start_ns, busy_ns[here]) + sent_ns
        if downlink_ns := to.timing.downlink_ns:
            self._down_ns[there] = max(self._down_ns[there], start_ns) + downlink_ns
            end_ns = max(end_ns, self._down_ns[there])
        self._time.at(end_ns + latency_ns, arrived, to)
