"""The daemon with another planner: what `benchmarks.placement_daemons` compares ours with.

The plan comes from a file that all daemons of a swarm read, so they agree on it as on any other;
before all its peers are there, the planner's own plan holds. With `gpipe` stages do all forwards
before the first backward and every holder of a segment owns an equal part, as DT-FM executed its
plans. Nothing of the product knows of this.
"""

import os
from pathlib import Path

import msgspec

from benchmarks.emulated_swarm import EXECUTION_VARIABLE, FORCED_PLAN_VARIABLE
from p2p_dtfm.cli import main
from p2p_dtfm.core.planner import wire_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.schedule.pipeline_order import StageOrder
from p2p_dtfm.daemon.machine.world import Machine


def force(forced: Plan) -> None:
    wanted = {*forced.stage_holders(), *forced.spares}

    ours = Machine.plan

    def plan(machine: Machine, snapshot: Snapshot) -> Plan | NoPlan:
        there = {record.peer_id for record in snapshot.records}
        return forced if there == wanted else ours(machine, snapshot)

    Machine.plan = plan


def execute_as_dtfm() -> None:
    """GPipe: a flush is as many microbatches as may be in flight."""
    forward, backward = StageOrder._forward_can_run.fget, StageOrder._backward_can_run.fget

    def flush_end(order: StageOrder) -> int:
        first, size = order._microbatches.start, order._in_flight
        flushed = (order._next_backward - first) // size * size
        return min(first + flushed + size, order._microbatches.stop)

    def forward_can_run(order: StageOrder) -> bool:
        return order._next_forward < flush_end(order) and forward(order)

    def backward_can_run(order: StageOrder) -> bool:
        return order._next_forward == flush_end(order) and backward(order)

    StageOrder._forward_can_run = property(forward_can_run)
    StageOrder._backward_can_run = property(backward_can_run)
    wire_plan._weights = lambda segments, lengths, problem: [
        (1,) * len(segment.holders) for segment in segments
    ]


if __name__ == "__main__":
    if path := os.environ.get(FORCED_PLAN_VARIABLE):
        force(msgspec.json.decode(Path(path).read_bytes(), type=Plan))
    if os.environ.get(EXECUTION_VARIABLE) == "gpipe":
        execute_as_dtfm()
    main()
