"""When each stage of one pipeline ends, tasklet by tasklet: what `pipeline_cost` puts in formulas.

The formulas are exact to a thousandth where every stage may hold as many microbatches as it wants.
Where memory allows fewer, or two links share an uplink, they are off by up to a tenth; so the few
placements that are left to choose from are timed here. Tasklets run in the order of
`pipeline_order`; a link, an uplink and a downlink carry one tensor after the other.
"""

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTiming:
    """One stage and its hop to the next (zeros at the last), for one microbatch."""

    forward_ns: int
    backward_ns: int
    in_flight: int
    out_ns: int
    """Transmission of the activation, and the handling of a message."""
    out_latency_ns: int
    back_ns: int
    """Of the gradient, from the next stage to this one."""
    back_latency_ns: int
    uplink_ns: int = 0
    """For which one tensor takes the peer's shared uplink; 0: not limited."""
    downlink_ns: int = 0
    weight_ns: int = 0
    """What of the backward is left for when nothing else can run; 0: nothing."""


def stage_ends_ns(stages: tuple[StageTiming, ...], microbatches: int) -> tuple[int, ...]:
    """When each stage has done all its backwards, counted from the start of the step."""
    return _Run(stages, microbatches).ends_ns()


_RAN, _INPUT, _GRADIENT, _WEIGHT = range(4)


class _Stage:
    """One stage on its way. Everything arrives in the order of the microbatches."""

    __slots__ = (
        "backward_was_last",
        "backwards",
        "backwards_done",
        "busy",
        "down_ns",
        "end_ns",
        "forwards",
        "held",
        "link_back_ns",
        "link_out_ns",
        "up_ns",
        "weights_done",
    )  # fmt: skip

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        """Whose input, or output's gradient, is here and which did not run yet."""
        self.held = 0
        """Between the start of their forward and the end of their backward."""
        self.backwards_done = self.weights_done = 0
        self.backward_was_last = False
        self.busy = False
        self.link_out_ns = self.link_back_ns = 0
        """Until when the links to the next stage and to the one before are taken."""
        self.up_ns = self.down_ns = 0
        self.end_ns = 0


class _Run:
    """The events of one pipeline."""

    def __init__(self, stages: tuple[StageTiming, ...], microbatches: int) -> None:
        self.timings = stages
        self.stages = [_Stage() for _ in stages]
        self.stages[0].forwards = microbatches
        self.microbatches = microbatches
        self.queue: list[tuple[int, int, int, int]] = []
        """(time, number of the event, what, stage)"""
        self.number = 0

    def ends_ns(self) -> tuple[int, ...]:
        queue, stages, last = self.queue, self.stages, len(self.stages) - 1
        self._pick(0, 0)
        while queue:
            now, _, what, at = heapq.heappop(queue)
            stage = stages[at]
            if what == _INPUT:
                stage.forwards += 1
            elif what == _GRADIENT:
                stage.backwards += 1
            elif what == _WEIGHT:
                stage.busy = False
                stage.held -= 1
                stage.weights_done += 1
                stage.end_ns = now
            else:
                stage.busy = False
                if stage.backward_was_last:
                    stage.held -= 0 if self.timings[at].weight_ns else 1
                    stage.backwards_done += 1
                    stage.end_ns = now
                    if at:
                        self._send(now, at, at - 1)
                elif at == last:
                    stage.backwards += 1
                else:
                    self._send(now, at, at + 1)
            if not stage.busy:
                self._pick(now, at)
        assert all(stage.backwards_done == self.microbatches for stage in stages)
        return tuple(stage.end_ns for stage in stages)

    def _pick(self, now: int, at: int) -> None:
        """Start the next tasklet, if there is one."""
        stage, timing = self.stages[at], self.timings[at]
        forward = stage.forwards > 0 and stage.held < timing.in_flight
        if stage.backwards and not (forward and stage.backward_was_last):
            stage.backwards -= 1
            stage.backward_was_last = True
            duration = timing.backward_ns - timing.weight_ns
        elif forward:
            stage.forwards -= 1
            stage.held += 1
            stage.backward_was_last = False
            duration = timing.forward_ns
        elif timing.weight_ns and stage.weights_done < stage.backwards_done:
            stage.busy = True
            self._at(now + timing.weight_ns, _WEIGHT, at)
            return
        else:
            return
        stage.busy = True
        self._at(now + duration, _RAN, at)

    def _send(self, now: int, at: int, to: int) -> None:
        sender, receiver = self.stages[at], self.stages[to]
        hop = self.timings[min(at, to)]
        start = now
        uplink, downlink = self.timings[at].uplink_ns, self.timings[to].downlink_ns
        if uplink:
            start = max(now, sender.up_ns)
            sender.up_ns = start + uplink
        if to > at:
            end = sender.link_out_ns = max(start, sender.link_out_ns) + hop.out_ns
            latency, what = hop.out_latency_ns, _INPUT
        else:
            end = sender.link_back_ns = max(start, sender.link_back_ns) + hop.back_ns
            latency, what = hop.back_latency_ns, _GRADIENT
        if downlink:
            receiver.down_ns = max(receiver.down_ns, start) + downlink
            end = max(end, receiver.down_ns)
        self._at(end + latency, what, to)

    def _at(self, time_ns: int, what: int, stage: int) -> None:
        self.number += 1
        heapq.heappush(self.queue, (time_ns, self.number, what, stage))
