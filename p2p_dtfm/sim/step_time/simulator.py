"""The step-time simulator: how long a step of a plan takes in a scenario, and where it goes."""

import itertools
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from p2p_dtfm.core.cost_model.guarding import Guarded
from p2p_dtfm.core.cost_model.pipeline_timing import Began, Choose, StageAtWork, in_turns
from p2p_dtfm.core.cost_model.step_timing import Contribution, StepAtWork
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.schedule.inner_steps import group_sizes
from p2p_dtfm.core.schedule.tasklets import BACKWARD, FORWARD, TaskletKind
from p2p_dtfm.sim.scenario.execution import Execution
from p2p_dtfm.sim.scenario.scenario import Scenario, lines_of
from p2p_dtfm.sim.step_time.communicator_pipeline import run_communicator_pipelines, whole_flushes
from p2p_dtfm.sim.step_time.guard_transfers import guards_in_place
from p2p_dtfm.sim.step_time.reduction_transfers import Reductions
from p2p_dtfm.sim.step_time.step_work import SimulatedStage, StepWork, step_work
from p2p_dtfm.sim.step_time.timeline import NEVER, StageTimeline, StepTime


def simulate_step(
    plan: Plan,
    scenario: Scenario,
    workload: Workload,
    execution: Execution,
    trace: bool = False,
) -> StepTime:
    """Time one step. `workload` comes from `workload_in`, counted in values rather than on the
    wire; `scenario` has every peer that the plan names. Raises `UserError` for a missing link.
    """
    work = step_work(plan, scenario, workload, execution)
    step = _simulate(work, scenario, execution, (), trace)
    if not execution.commit:
        return step
    guards = guards_in_place(plan, scenario, workload, step.total_ns - work.ends_meet_ns)
    return _simulate(work, scenario, execution, guards, trace) if guards else step


def _simulate(
    work: StepWork,
    scenario: Scenario,
    execution: Execution,
    guards: Sequence[Guarded],
    trace: bool,
) -> StepTime:
    step = StepAtWork(lines_of(scenario), work.boundary_bytes, guards)
    reductions = Reductions(step, scenario, work.segments, execution.reduction)
    by_layer = execution.overlap == "layer" and execution.communicator is None
    at_layers: dict[int, list[Contribution]] = {}
    at_end: dict[int, list[int]] = {}
    """By peer: layers at which a gradient sets out, by itself or with the others of its stage."""
    for stage in itertools.chain(*work.pipelines):
        if by_layer:
            at_layers[stage.peer] = [
                (below_ns, partial(reductions.contribute, layer))
                for layer, below_ns in stage.below_ns.items()
            ]
        else:
            at_end[stage.peer] = list(stage.below_ns)
    waiting: list[int] = []
    """Peers whose reduction waits until all pipelines are done."""
    stages_left = sum(map(len, work.pipelines))

    def done(peer: int) -> None:
        nonlocal stages_left
        stages_left -= 1
        waiting.append(peer)
        if execution.overlap == "none" and stages_left:
            return
        for each in waiting:
            for layer in at_end.get(each, ()):
                reductions.contribute(layer, each)
        waiting.clear()

    if execution.communicator is not None:
        stages = run_communicator_pipelines(
            scenario, work, execution.communicator, execution.flush_microbatches, trace
        )
        for line in stages:
            step.time.at(line.done_ns, step.computed, line.work.peer)
            step.time.at(line.done_ns, done, line.work.peer)
    else:
        stages, began = _watched(step, work, execution, trace)
        step.begin(work.timed(), at_layers, began, done, _order(execution, work))
    ended_ns = step.run()
    assert not stages_left, "every stage finishes"
    commit_ns = 0
    if execution.commit:
        commit_ns = step.committed_ns() - ended_ns + work.ends_meet_ns
    sequences = _sequences(work, execution)
    return _summary(stages, scenario, reductions, step, ended_ns, commit_ns, sequences)


def _watched(
    step: StepAtWork, work: StepWork, execution: Execution, trace: bool
) -> tuple[tuple[StageTimeline, ...], Began]:
    """A timeline of each stage, and the function that keeps it."""
    flush = _flush(execution, work) if execution.order == "gpipe" else NEVER

    def timeline(stage: SimulatedStage) -> StageTimeline:
        begins = frozenset(accumulate(group_sizes(stage.microbatches, work.inner_steps)))
        return StageTimeline(stage, tasklets=[] if trace else None, flush=flush, begins=begins)

    lines = [list(map(timeline, pipeline)) for pipeline in work.pipelines]

    def began(stage: StageAtWork, kind: TaskletKind, count: int, end_ns: int) -> None:
        line = lines[stage.pipeline][stage.position]
        line.began(stage, kind, count, step.time.now_ns, end_ns)

    return tuple(itertools.chain(*lines)), began


def _flush(execution: Execution, work: StepWork) -> int:
    return execution.flush_microbatches or max(p[0].microbatches for p in work.pipelines)


def _order(execution: Execution, work: StepWork) -> Choose:
    """1F1B, or GPipe (Huang et al. 2019): the forwards of a flush, then its backwards."""
    if execution.order == "1f1b":
        return in_turns
    flush = _flush(execution, work)

    def forwards_first(stage: StageAtWork) -> TaskletKind | None:
        done = stage.microbatches - stage.left
        flush_end = min((done // flush + 1) * flush, stage.microbatches)
        if stage.forwards_begun < flush_end:
            return FORWARD if stage.forwards else None
        return BACKWARD if stage.backwards else None

    return forwards_first


def _sequences(work: StepWork, execution: Execution) -> int:
    """How many of the step's microbatches the execution does: whole flushes only, as DT-FM did."""
    done = 0
    for pipeline in work.pipelines:
        count = pipeline[0].microbatches
        if execution.communicator is not None:
            flushes, size = whole_flushes(count, execution.flush_microbatches)
            count = flushes * size
        done += count
    return done


def _summary(
    stages: tuple[StageTimeline, ...],
    scenario: Scenario,
    reductions: Reductions,
    step: StepAtWork,
    ended_ns: int,
    commit_ns: int,
    microbatches: int,
) -> StepTime:
    done_ns = max(stage.done_ns for stage in stages)
    reduced_ns = reductions.reduced_ns
    busiest = max(stages, key=lambda stage: (stage.busy_ns, -stage.waiting_ns))
    drain_ns = done_ns - busiest.done_ns
    names = [peer.name for peer in scenario.peers]
    return StepTime(
        total_ns=ended_ns + commit_ns,
        compute_ns=busiest.busy_ns,
        waiting_ns=busiest.waiting_ns,
        fill_and_drain_ns=busiest.fill_and_drain_ns + drain_ns,
        reduction_ns=reduced_ns - done_ns,
        guarding_ns=ended_ns - reduced_ns,
        commit_ns=commit_ns,
        pipelines_done_ns=done_ns,
        microbatches=microbatches,
        stages=stages,
        reductions=reductions.spans(),
        links={(names[a], names[b]): used for (a, b), used in step.network.links().items()},
        event_count=step.time.event_count,
    )
