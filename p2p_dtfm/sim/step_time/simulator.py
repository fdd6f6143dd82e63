"""The step-time simulator: how long a step of a plan takes in a scenario, and where it goes."""

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.virtual.virtual_network import VirtualNetwork
from p2p_dtfm.core.virtual.virtual_time import VirtualTime
from p2p_dtfm.sim.scenario.execution import STREAM_OVERHEAD_NS, Execution
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_lines import lines_of
from p2p_dtfm.sim.step_time.communicator_pipeline import run_communicator_pipelines, whole_flushes
from p2p_dtfm.sim.step_time.guard_transfers import Guarding, GuardTransfer, guards_in_place
from p2p_dtfm.sim.step_time.reduction_transfers import Reductions
from p2p_dtfm.sim.step_time.step_work import StageWork, StepWork, step_work
from p2p_dtfm.sim.step_time.stream_pipeline import StreamPipelines
from p2p_dtfm.sim.step_time.timeline import StageTimeline, StepTime


def simulate_step(
    plan: Plan,
    scenario: Scenario,
    workload: Workload,
    execution: Execution,
    measured_flops: int | None = None,
    trace: bool = False,
) -> StepTime:
    """Time one step. `workload` comes from `workload_in`, counted in values rather than on the
    wire; `scenario` has every peer that the plan names. Raises `UserError` for a missing link.
    """
    work = step_work(plan, scenario, workload, execution, measured_flops)
    step = _simulate(work, scenario, execution, (), trace)
    if not execution.commit:
        return step
    guards = guards_in_place(plan, scenario, workload, step.total_ns)
    return _simulate(work, scenario, execution, guards, trace) if guards else step


def _simulate(
    work: StepWork,
    scenario: Scenario,
    execution: Execution,
    guards: tuple[GuardTransfer, ...],
    trace: bool,
) -> StepTime:
    time = VirtualTime()
    network = VirtualNetwork(time, lines_of(scenario), STREAM_OVERHEAD_NS)
    reductions = Reductions(time, network, scenario, work.segments, execution.reduction)
    waiting: list[tuple[int, int]] = []
    """Holders and layers whose reduction waits until all pipelines are done."""
    stages_left = sum(map(len, work.pipelines))
    guarding = Guarding(time, network, guards)

    def stage_done(stage: StageWork) -> None:
        nonlocal stages_left
        stages_left -= 1
        guarding.send(stage.peer)
        whole = [(stage.peer, layer) for layer in stage.below_ns]
        if execution.overlap == "stage":
            for peer, layer in whole:
                reductions.contribute(peer, layer)
            return
        waiting.extend(whole)
        if execution.overlap == "none" and not stages_left:
            for peer, layer in waiting:
                reductions.contribute(peer, layer)

    def layer_done(stage: StageWork, layer: int) -> None:
        if execution.overlap == "layer":
            reductions.contribute(stage.peer, layer)

    if execution.communicator is not None:
        stages = run_communicator_pipelines(
            scenario, work, execution.communicator, execution.flush_microbatches, trace
        )
        for stage in stages:
            time.at(stage.done_ns, stage_done, stage.work)
        time.run()
    else:
        pipelines = StreamPipelines(time, network, work, execution, stage_done, layer_done, trace)
        pipelines.start()
        time.run()
        stages = pipelines.timelines()
    assert not stages_left, "every stage finishes"
    ready_ns = {**reductions.reduced_ns, **guarding.received_ns}
    ended_ns = max(ready_ns.values())
    commit_ns = _committed_ns(scenario, ready_ns) - ended_ns if execution.commit else 0
    sequences = _sequences(work, execution)
    return _summary(stages, scenario, reductions, network, time, ended_ns, commit_ns, sequences)


def _committed_ns(scenario: Scenario, reduced_ns: dict[int, int]) -> int:
    """When the last stage holder has the Prepared of every other one."""
    names = {peer: scenario.peers[peer].name for peer in reduced_ns}
    last = max(reduced_ns.values())
    for peer, sent_ns in reduced_ns.items():
        for other, name in names.items():
            if other != peer:
                arrived = sent_ns + scenario.link(names[peer], name).latency_ns
                last = max(last, arrived)
    return last


def _sequences(work: StepWork, execution: Execution) -> int:
    """Microbatches that the execution does of the step's; whole flushes only, as DT-FM did."""
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
    network: VirtualNetwork,
    time: VirtualTime,
    ended_ns: int,
    commit_ns: int,
    microbatches: int,
) -> StepTime:
    done_ns = max(stage.done_ns for stage in stages)
    reduced_ns = max(reductions.reduced_ns.values())
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
        links={(names[a], names[b]): used for (a, b), used in network.links().items()},
        event_count=time.event_count,
    )
