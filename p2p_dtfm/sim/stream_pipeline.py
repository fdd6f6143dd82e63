"""Pipelines over persistent streams: a stage computes and sends at once, and waits for data only.

1F1B: a stage takes turns between forwards and backwards, as far as there are any, and holds at most
`in_flight` microbatches between the two (Narayanan et al. 2019; there in_flight is depth - stage,
here the plan says it). `core.pipeline_order` is the same order in the daemon.
GPipe: the forwards of a flush, then its backwards (Huang et al. 2019).
"""

import itertools
from collections import deque
from collections.abc import Callable

from p2p_dtfm.core.virtual_network import VirtualNetwork
from p2p_dtfm.core.virtual_time import VirtualTime
from p2p_dtfm.sim.execution import Execution
from p2p_dtfm.sim.stage_work import StageWork, StepWork
from p2p_dtfm.sim.timeline import StageTimeline


class _Stage:
    """A stage at work."""

    __slots__ = (
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
        self.busy = False
        self.running = (False, 0, 0)


class StreamPipelines:
    """All pipelines of a step. `stage_done(peer)` is called when a stage's gradients are whole."""

    def __init__(
        self,
        time: VirtualTime,
        network: VirtualNetwork,
        work: StepWork,
        execution: Execution,
        stage_done: Callable[[int], None],
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
                self._run(stage, False, stage.forwards.popleft())
            elif stage.backwards and stage.forwards_done == flush_end:
                self._run(stage, True, stage.backwards.popleft())
            return
        held = stage.forwards_started - stage.backwards_done
        forward = bool(stage.forwards) and held < stage.work.in_flight
        backward_was_last = stage.running[0]
        if stage.backwards and not (forward and backward_was_last):
            self._run(stage, True, stage.backwards.popleft())
        elif forward:
            self._run(stage, False, stage.forwards.popleft())

    def _run(self, stage: _Stage, backward: bool, microbatch: int) -> None:
        now = self._time.now_ns
        work, timeline = stage.work, stage.timeline
        end = now + (work.backward_ns if backward else work.forward_ns)
        if backward:
            first = (
                stage.backwards_done == 0
                if not self._gpipe
                else (stage.backwards_done % self._flush == 0)
            )
        else:
            first = (
                stage.forwards_started == 0
                if not self._gpipe
                else (stage.forwards_started % self._flush == 0)
            )
            stage.forwards_started += 1
            held = stage.forwards_started - stage.backwards_done
            if held > timeline.peak_in_flight:
                timeline.peak_in_flight = held
        timeline.ran(now, end, first)
        if timeline.tasklets is not None:
            timeline.tasklets.append((backward, microbatch, now, end))
        stage.busy = True
        stage.running = (backward, microbatch, end)
        self._time.at(end, self._ran, stage)

    def _ran(self, stage: _Stage) -> None:
        stage.busy = False
        backward, microbatch, _ = stage.running
        if backward:
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
            if stage.backwards_done == stage.work.microbatches:
                self._stage_done(stage.work.peer)
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
        self._pick(stage)

    def _activation_arrived(self, arrived: tuple[_Stage, int]) -> None:
        stage, microbatch = arrived
        stage.forwards.append(microbatch)
        self._pick(stage)

    def _gradient_arrived(self, arrived: tuple[_Stage, int]) -> None:
        stage, microbatch = arrived
        stage.backwards.append(microbatch)
        self._pick(stage)
