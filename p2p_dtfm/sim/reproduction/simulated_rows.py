"""The simulator's time for a row of the paper's table, under DT-FM's execution."""

import statistics
from dataclasses import replace

from p2p_dtfm.sim.paper.named_plans import grid_plan, random_orders, region_order
from p2p_dtfm.sim.paper.published import STAGES, PublishedRow
from p2p_dtfm.sim.scenario.execution import (
    DTFM_COMMUNICATOR,
    Communicator,
    Execution,
    execution_named,
)
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in
from p2p_dtfm.sim.step_time.communicator_pipeline import whole_flushes
from p2p_dtfm.sim.step_time.simulator import simulate_step

RUN = "gpt3-xl"
REPLICAS = 8


def with_forward_flops(scenario: Scenario, flops: int) -> Scenario:
    """The scenario with all peers at another compute rate."""
    peers = tuple(replace(peer, forward_flops=flops) for peer in scenario.peers)
    return replace(scenario, peers=peers)


def dtfm_times_s(
    scenario: Scenario,
    placement: str,
    layers: int,
    batch: int,
    communicator: Communicator = DTFM_COMMUNICATOR,
) -> list[tuple[float, float]]:
    """(seconds until all backwards are done, seconds of reduction after them) of each run.

    Random placement has three runs, region order one.
    """
    orders = random_orders(scenario, 0) if placement == "random" else [region_order(scenario)]
    execution = replace(_execution(layers), communicator=communicator)
    workload = workload_in(scenario, read_run_spec(RUN, layers, batch), execution)
    times = []
    for order in orders:
        plan = grid_plan(order, workload, STAGES)
        step = simulate_step(plan, scenario, workload, execution)
        times.append((step.pipelines_done_ns / 1e9, step.reduction_ns / 1e9))
    return times


def dtfm_time_s(
    row: PublishedRow, scenario: Scenario, communicator: Communicator = DTFM_COMMUNICATOR
) -> float:
    """Simulated seconds of a row. For random placement, the median run, as the table has it."""
    runs = dtfm_times_s(scenario, row.placement, row.layers, row.batch, communicator)
    return statistics.median(pipelines + rest for pipelines, rest in runs)


def dtfm_seconds_by_batch(
    scenario: Scenario, placement: str, layers: int, batches: tuple[int, ...]
) -> dict[int, float]:
    """Seconds for several batches, from simulations of one flush and of two: flushes after the
    first are alike."""
    flush = _execution(layers).flush_microbatches * REPLICAS
    one = dtfm_times_s(scenario, placement, layers, flush)
    two = dtfm_times_s(scenario, placement, layers, 2 * flush)
    runs = [(sum(first), after[0] - first[0]) for first, after in zip(one, two, strict=True)]
    return {
        batch: statistics.median(first + (batch // flush - 1) * further for first, further in runs)
        for batch in batches
    }


def dtfm_sequences(layers: int, batch: int) -> int:
    """The sequences of a batch that DT-FM really computed: only whole flushes."""
    flushes, size = whole_flushes(batch // REPLICAS, _execution(layers).flush_microbatches)
    return flushes * size * REPLICAS


def _execution(layers: int) -> Execution:
    return execution_named("dtfm", layers)
