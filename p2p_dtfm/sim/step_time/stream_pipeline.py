"""Pipelines over persistent streams: a stage computes and sends at once, and waits for data only.

1F1B: a stage takes turns between forwards and backwards, as far as there are any, and holds at most
`in_flight` microbatches between the two (Narayanan et al. 2019; there in_flight is depth - stage,
here the plan says it). `core.schedule.pipeline_order` is the same order in the daemon. A stage that
splits its backwards leaves what can wait for when nothing else can run (Qi et al. 2023). GPipe: the
forwards of a flush, then its backwards (Huang et al. 2019).
"""

import itertools
from collections import deque
from collections.abc import Callable

from p2p_dtfm.core.virtual.virtual_network import VirtualNetwork
from p2p_dtfm.core.virtual.virtual_time import VirtualTime
from p2p_dtfm.sim.scenario.execution import Execution
from p2p_dtfm.sim.step_time.step_work import StageWork, StepWork
from p2p_dtfm.sim.step_time.timeline import StageTimeline

FORWARD, BACKWARD, WEIGHT = range(3)


class _Stage:
    """A stage at work."""

    __slots__ = (
        "backward_was_last",
        "backwards",
        "backwards_done",
        "busy",
        "forwards",
        "forwards_done",
        "forwards_started",
        "next",
        "previous",
        "running",
        "timeline",
        "weights_done",
        "work",
    )

    def __init__(self, work: StageWork, trace: bool) -> None:
        self.work = work
        self.timeline = StageTimeline(work, tasklets=[] if trace else None)
        self.previous: _Stage | None = None
        self.next: _Stage | None = None
        self.forwards: deque[int] = deque()
        """Microbatches whose input is here."""
        self.backwards: deque[int] = deque()
        """Microbatches whose output's gradient is here."""
        self.forwards_started = 0
        self.forwards_done = 0
        self.backwards_done = 0
        self.weights_done = 0
        self.backward_was_last = False
        self.busy = False
        self.running = (FORWARD, 0, 0)

    @property
    def held(self) -> int:
        """Microbatches of which anything is kept."""
        ended = self.weights_done if self.work.weight_ns else self.backwards_done
        return self.forwards_started - ended


class StreamPipelines:
    """All pipelines of a step. `layer_done(stage, layer)` is called when a gradient may set out,
    `stage_done(stage)` when all of a stage are whole."""

    def __init__(
        self,
        time: VirtualTime,
        network: VirtualNetwork,
        work: StepWork,
        execution: Execution,
        stage_done: Callable[[StageWork], None],
        layer_done: Callable[[StageWork, int], None],
        trace: bool,
    ) -> None:
        self._time = time
        self._network = network
        self._boundary_bytes = work.boundary_bytes
        self._gpipe = execution.order == "gpipe"
        self._flush = execution.flush_microbatches or max(
            stage.microbatches for pipeline in work.pipelines for stage in pipeline
        )
        self._stage_done = stage_done
        self._layer_done = layer_done
        self._pipelines = [[_Stage(s, trace) for s in pipeline] for pipeline in work.pipelines]
        for stages in self._pipelines:
            for before, after in itertools.pairwise(stages):
                before.next, after.previous = after, before

    def start(self) -> None:
        """Every first stage has its microbatches at hand."""
        for stages in self._pipelines:
            stages[0].forwards.extend(range(stages[0].work.microbatches))
            self._pick(stages[0])

    def timelines(self) -> tuple[StageTimeline, ...]:
        return tuple(stage.timeline for stages in self._pipelines for stage in stages)

    def _pick(self, stage: _Stage) -> None:
        """Start the next tasklet, if there is one and nothing is running."""
        if stage.busy:
            return
        if self._gpipe:
            flush_end = (stage.backwards_done // self._flush + 1) * self._flush
            flush_end = min(flush_end, stage.work.microbatches)
            if stage.forwards and stage.forwards_started < flush_end:
                self._run(stage, FORWARD, stage.forwards.popleft())
            elif stage.backwards and stage.forwards_done == flush_end:
                self._run(stage, BACKWARD, stage.backwards.popleft())
            return
        forward = bool(stage.forwards) and stage.held < stage.work.in_flight
        if stage.backwards and not (forward and stage.backward_was_last):
            self._run(stage, BACKWARD, stage.backwards.popleft())
        elif forward:
            self._run(stage, FORWARD, stage.forwards.popleft())
        elif stage.work.weight_ns and stage.weights_done < stage.backwards_done:
            self._run(stage, WEIGHT, stage.weights_done)

    def _run(self, stage: _Stage, kind: int, microbatch: int) -> None:
        now = self._time.now_ns
        work, timeline = stage.work, stage.timeline
        first = False
        if kind == FORWARD:
            end = now + work.forward_ns
            first = stage.forwards_started % (self._flush if self._gpipe else 1 << 62) == 0
            stage.forwards_started += 1
            if stage.held > timeline.peak_in_flight:
                timeline.peak_in_flight = stage.held
        elif kind == BACKWARD:
            end = now + work.backward_ns - work.weight_ns
            first = stage.backwards_done % (self._flush if self._gpipe else 1 << 62) == 0
            if not work.weight_ns and stage.backwards_done == work.microbatches - 1:
                self._layers_end(stage, end, 1)
        else:
            count = 1
            if stage.backwards_done == work.microbatches:  # all that is left, layer by layer
                count = work.microbatches - stage.weights_done
                self._layers_end(stage, now + count * work.weight_ns, count)
            stage.weights_done += count - 1
            end = now + count * work.weight_ns
        timeline.ran(now, end, first)
        if timeline.tasklets is not None:
            timeline.tasklets.append((kind != FORWARD, microbatch, now, end))
        stage.busy = True
        stage.running = (kind, microbatch, end)
        if kind != WEIGHT:
            stage.backward_was_last = kind == BACKWARD
        self._time.at(end, self._ran, stage)

    def _layers_end(self, stage: _Stage, end: int, count: int) -> None:
        """The last part of the last `count` microbatches ends at `end`: a layer's comes earlier."""
        for layer, below_ns in stage.work.below_ns.items():
            self._time.at(end - count * below_ns, self._layer_ended, (stage, layer))

    def _layer_ended(self, ended: tuple[_Stage, int]) -> None:
        self._layer_done(ended[0].work, ended[1])

    def _ran(self, stage: _Stage) -> None:
        stage.busy = False
        kind, microbatch, _ = stage.running
        if kind == WEIGHT:
            stage.weights_done += 1
        elif kind == BACKWARD:
            stage.backwards_done += 1
            if stage.previous is not None:
                self._network.send(
                    stage.work.peer,
                    stage.previous.work.peer,
                    self._boundary_bytes,
                    self._gradient_arrived,
                    (stage.previous, microbatch),
                    urgent=True,
                )
        else:
            stage.forwards_done += 1
            if stage.next is None:
                stage.backwards.append(microbatch)
            else:
                self._network.send(
                    stage.work.peer,
                    stage.next.work.peer,
                    self._boundary_bytes,
                    self._activation_arrived,
                    (stage.next, microbatch),
                    urgent=True,
                )
        if kind != FORWARD and stage.forwards_started - stage.held == stage.work.microbatches:
            self._stage_done(stage.work)
        self._pick(stage)

    def _activation_arrived(self, arrived: tuple[_Stage, int]) -> None:
        stage, microbatch = arrived
        stage.forwards.append(microbatch)
        self._pick(stage)

    def _gradient_arrived(self, arrived: tuple[_Stage, int]) -> None:
        stage, microbatch = arrived
        stage.backwards.append(microbatch)
        self._pick(stage)
