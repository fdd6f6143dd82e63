"""A pipeline as DT-FM ran it: GPipe over one blocking communicator in each peer.

Every peer does the same things in the same order: receive, compute and send for each microbatch of
a flush, first forwards and then, after a barrier, backwards. Because that order is fixed, the time
of each operation follows from operations before it, and no queue of events is needed.

A message takes x ns at the efficient rate, over a link of latency l. R ns worth of its bytes may be
on their way or wait at the receiver. S ns worth are those that a sender need not wait for:

    begins     once the sender gets there and its previous message has left
    has left   x later; what exceeds R leaves l after the receive is posted, when word of it is
               back, or after the previous message's receive was, as far as that one filled R
    received   l after it has left, no earlier than the receive is posted
    returns    S before it has left; before the receive is posted only if R + S hold it all
"""

import itertools
from dataclasses import dataclass

from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.sim.scenario.execution import Communicator
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.step_time.step_work import SimulatedStage, StepWork
from p2p_dtfm.sim.step_time.timeline import StageTimeline


@dataclass(frozen=True, slots=True)
class _Hop:
    """Nanoseconds of one boundary tensor from a stage to its neighbour."""

    transmit_ns: int
    latency_ns: int
    buffered_ns: int
    unacknowledged_ns: int


@dataclass(slots=True)
class _Engines:
    """When each engine of a stage is free again."""

    compute_ns: int = 0
    communicator_ns: int = 0
    link_ns: int = 0
    """When the link out is free, in the direction of the present phase."""
    posted_ns: int | None = None
    """When the receive of the previous message on that link was posted."""


def run_communicator_pipelines(
    scenario: Scenario,
    work: StepWork,
    communicator: Communicator,
    flush_microbatches: int,
    trace: bool,
) -> tuple[StageTimeline, ...]:
    """Timelines of all stages, pipeline by pipeline. Only whole flushes are done."""
    timelines: list[StageTimeline] = []
    for stages in work.pipelines:
        lines = [StageTimeline(stage, tasklets=[] if trace else None) for stage in stages]
        _run_pipeline(scenario, work.boundary_bytes, communicator, flush_microbatches, lines)
        timelines += lines
    return tuple(timelines)


def whole_flushes(microbatches: int, flush_microbatches: int) -> tuple[int, int]:
    """(flushes, microbatches in each)."""
    size = min(microbatches, flush_microbatches or microbatches)
    return microbatches // size, size


def _run_pipeline(
    scenario: Scenario,
    boundary_bytes: int,
    communicator: Communicator,
    flush_microbatches: int,
    lines: list[StageTimeline],
) -> None:
    stages = [line.work for line in lines]
    flushes, size = whole_flushes(stages[0].microbatches, flush_microbatches)
    there = [
        _hop(scenario, boundary_bytes, communicator, stage, after)
        for stage, after in itertools.pairwise(stages)
    ]
    back = [
        _hop(scenario, boundary_bytes, communicator, after, stage)
        for stage, after in itertools.pairwise(stages)
    ]
    engines = [_Engines() for _ in stages]
    for flush in range(flushes):
        first = flush * size
        _run_phase(lines, engines, there, range(first, first + size), backward=False)
        _barrier(engines)
        _run_phase(lines[::-1], engines[::-1], back[::-1], range(first, first + size), True)
    for line in lines:
        line.peak_in_flight = size


def _run_phase(
    lines: list[StageTimeline],
    engines: list[_Engines],
    hops: list[_Hop],
    microbatches: range,
    backward: bool,
) -> None:
    """All microbatches once along `lines`."""
    for microbatch in microbatches:
        arrived = 0
        for position, line in enumerate(lines):
            here = engines[position]
            start = max(here.compute_ns, arrived)
            timing = line.work.timing
            end = here.compute_ns = start + (timing.backward_ns if backward else timing.forward_ns)
            line.ran(start, end, microbatch == microbatches.start)
            if line.tasklets is not None:
                line.tasklets.append((backward, microbatch, start, end))
            if position + 1 < len(lines):
                arrived = _pass(hops[position], here, engines[position + 1])


def _pass(hop: _Hop, sender: _Engines, receiver: _Engines) -> int:
    """Send what the sender has just computed; when it is received."""
    at_send = max(sender.compute_ns, sender.communicator_ns)
    posted = receiver.communicator_ns
    unhindered = max(at_send, sender.link_ns) + hop.transmit_ns
    excess = 2 * hop.transmit_ns - hop.buffered_ns
    if sender.posted_ns is not None and excess > 0:
        unhindered = max(unhindered, sender.posted_ns + hop.latency_ns + excess)
    left = unhindered
    excess -= hop.transmit_ns
    if excess > 0:
        left = max(left, posted + hop.latency_ns + excess)
    returns = (unhindered if excess <= hop.unacknowledged_ns else left) - hop.unacknowledged_ns
    sender.link_ns, sender.posted_ns = left, posted
    sender.communicator_ns = max(at_send, returns)
    receiver.communicator_ns = max(left + hop.latency_ns, posted)
    return receiver.communicator_ns


def _barrier(engines: list[_Engines]) -> None:
    """No backward begins before all forwards are done; links then turn round."""
    latest = max(engine.compute_ns for engine in engines)
    for engine in engines:
        engine.compute_ns = engine.communicator_ns = engine.link_ns = latest
        engine.posted_ns = None


def _hop(
    scenario: Scenario,
    boundary_bytes: int,
    communicator: Communicator,
    origin: SimulatedStage,
    to: SimulatedStage,
) -> _Hop:
    link, back = scenario.link(origin.name, to.name), scenario.link(to.name, origin.name)
    limits = (scenario.peer(origin.name).uplink_bytes_per_s, link.bytes_per_s)
    down = scenario.peer(to.name).downlink_bytes_per_s
    rate = min(limit for limit in (*limits, down) if limit) * communicator.efficiency
    round_trip_ns = link.latency_ns + back.latency_ns
    return _Hop(
        transmit_ns=round(boundary_bytes * SECOND_NS / rate),
        latency_ns=link.latency_ns,
        buffered_ns=round(communicator.receive_buffer_bytes * SECOND_NS / rate) + round_trip_ns,
        unacknowledged_ns=min(round_trip_ns, round(communicator.window_bytes * SECOND_NS / rate)),
    )
