"""`p2p-dtfm simulate`: how long a step takes in a scenario, and where the time goes."""

import json
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from p2p_dtfm.cli.app import GlobalBatchOption, LayersOption
from p2p_dtfm.cli.terminal.output_files import check_writable, write_text
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.paper.cost import PaperSizes
from p2p_dtfm.sim.paper.named_plans import (
    default_stages,
    dtfm_order,
    grid_plan,
    paper_order,
    random_orders,
    region_order,
    within_memory,
)
from p2p_dtfm.sim.paper.scenario_problem import sizes_of
from p2p_dtfm.sim.scenario.execution import Execution, execution_named
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import on_the_wire, scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step
from p2p_dtfm.sim.step_time.timeline import StepTime
from p2p_dtfm.sim.step_time.trace import trace_json


class PlanName(StrEnum):
    OURS = "ours"
    PAPER = "paper"
    REGION = "region"
    RANDOM = "random"
    DTFM = "dtfm"


class ExecutionName(StrEnum):
    OURS = "ours"
    DTFM = "dtfm"


@dataclass(frozen=True, slots=True)
class Question:
    """What is simulated."""

    scenario: Scenario
    spec: RunSpec
    workload: Workload
    execution: Execution
    stages: int
    seed: int


def simulate(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or the name of a packaged one.")],
    run: Annotated[
        str, typer.Option("--run", help="Run spec file, or the name of a packaged one.")
    ] = "gpt3-xl",
    layers: LayersOption = None,
    global_batch: GlobalBatchOption = None,
    plan: Annotated[
        PlanName,
        typer.Option(
            help="ours: the planner's; paper: best by DT-FM's cost; region: peers in file order; "
            "random: the median of three random orders; dtfm: as DT-FM's own runs were placed."
        ),
    ] = PlanName.OURS,
    execution: Annotated[
        ExecutionName, typer.Option(help="How it is carried out: as we do, or as DT-FM did.")
    ] = ExecutionName.OURS,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Stages of a pipeline, for all plans but ours.")
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of random orders; 0 with 64 peers: the paper's own three.")
    ] = 0,
    link_efficiency: Annotated[
        float, typer.Option(help="Fraction of their stated rates that links reach.")
    ] = 1.0,
    recompute: Annotated[
        bool | None,
        typer.Option(
            help="Recompute activations in the backward, to save memory. Without it: as the run "
            "says, and where that is auto, everywhere with plans other than ours."
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            help="Of all tensors, instead of the run's: fp32, fp16, bf16, int8; or, of the "
            "reduction alone, sparse or sign."
        ),
    ] = None,
    reduction: Annotated[
        str | None,
        typer.Option(
            help="Instead of the execution's: flat, weighted, central, hierarchical, chain."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write what happens when, to open in ui.perfetto.dev.")
    ] = None,
) -> None:
    """Time one training step in a scenario, in virtual time."""
    began = time.perf_counter()
    check_writable(trace, "--trace")
    peers = read_scenario(scenario).with_link_efficiency(link_efficiency)
    from p2p_dtfm.train.model.kinds.registry import with_sizes  # torch, only for this

    spec = with_sizes(read_run_spec(run, layers, global_batch))
    how = execution_named(execution.value, spec.model.layers)
    how = _recomputing(how, recompute, spec, plan)
    if codec is not None:
        how = how.with_codec(codec)
    if reduction is not None:
        how = how.with_reduction(reduction)
    workload = workload_in(peers, spec, how)
    depth = stages or default_stages(len(peers.peers), workload.block_count)
    question = Question(peers, spec, workload, how, depth, seed)
    plans = _plans(question, plan)
    steps = [_step(question, placed, trace is not None) for placed in plans]
    order = sorted(range(len(steps)), key=lambda number: steps[number].total_ns)
    middle = order[len(order) // 2]
    if trace is not None:
        text = json.dumps(trace_json(steps[middle], question.scenario))
        write_text(trace, text, "--trace")
    result = _result(question, plan, plans[middle], steps[middle])
    result["runs_s"] = [step.total_ns / 1e9 for step in steps]
    result["elapsed_s"] = round(time.perf_counter() - began, 3)
    typer.echo(json.dumps(result) if as_json else _table(result))


def _recomputing(how: Execution, wanted: bool | None, spec: RunSpec, plan: PlanName) -> Execution:
    """As is wanted; else as the run says. Only our planner finds out where it pays."""
    if wanted is None and how.recompute is None and plan is not PlanName.OURS:
        wanted = spec.compute.recompute != "never"
    return how if wanted is None else replace(how, recompute=wanted)


def _plans(question: Question, name: PlanName) -> list[Plan]:
    """The plan of that name; of random orders, all three."""
    scenario, workload = question.scenario, question.workload
    if name is PlanName.OURS:
        plan = compute_plan(scenario_snapshot(scenario, question.spec, question.execution))
        if isinstance(plan, NoPlan):
            raise UserError(
                f"no plan for {scenario.name}: {plan.reason}",
                ("add peers or memory to the scenario", "choose a smaller model (--layers)"),
            )
        return [plan]
    if name is PlanName.RANDOM:
        orders = random_orders(scenario, question.seed)
    elif name is PlanName.PAPER:
        orders = [paper_order(scenario, question.stages, _sizes(question))]
    elif name is PlanName.DTFM:
        orders = [dtfm_order(scenario, question.stages, _sizes(question))]
    else:
        orders = [region_order(scenario)]
    plans = [grid_plan(order, workload, question.stages) for order in orders]
    if question.execution.communicator is not None:
        return plans
    return [within_memory(plan, scenario, workload) for plan in plans]


def _sizes(question: Question) -> PaperSizes:
    """What the paper's cost counts of this run."""
    return sizes_of(question.spec.name, on_the_wire(question.workload, question.execution))


def _step(question: Question, plan: Plan, trace: bool) -> StepTime:
    return simulate_step(
        plan, question.scenario, question.workload, question.execution, trace=trace
    )


def _result(question: Question, name: PlanName, plan: Plan, step: StepTime) -> dict[str, Any]:
    spec = question.spec
    sequences = step.microbatches * spec.batch.microbatch
    seconds = step.total_ns / 1e9
    return {
        "scenario": question.scenario.name,
        "run": spec.name,
        "plan_name": name.value,
        "execution": question.execution.name,
        "seconds_per_step": seconds,
        "parts": {
            "compute_s": step.compute_ns / 1e9,
            "waiting_for_links_s": step.waiting_ns / 1e9,
            "reduction_s": step.reduction_ns / 1e9,
            "fill_and_drain_s": step.fill_and_drain_ns / 1e9,
            "guarding_s": step.guarding_ns / 1e9,
            "commit_s": step.commit_ns / 1e9,
        },
        "predicted_s": plan.predicted_step_ns / 1e9,
        "sequences": sequences,
        "tokens_per_s": round(sequences * spec.model.context / seconds, 1),
        "pipelines": [
            [[stage.peer_id, stage.first_layer, stage.end_layer, stage.in_flight]
             for stage in pipeline.stages]
            for pipeline in plan.pipelines
        ],
        "microbatches": [pipeline.microbatch_count for pipeline in plan.pipelines],
        "spares": list(plan.spares),
        "plan": plan.digest(),
        "peers": {
            stage.work.name: {
                "busy_s": stage.busy_ns / 1e9,
                "waiting_for_links_s": stage.waiting_ns / 1e9,
                "peak_in_flight": stage.peak_in_flight,
            }
            for stage in step.stages
        },
        "reductions": [
            {
                "first_layer": span.first_layer,
                "holders": len(span.holders),
                "bytes": span.gradient_bytes,
                "seconds": (span.end_ns - span.start_ns) / 1e9,
            }
            for span in step.reductions
        ],
        "events": step.event_count,
    }  # fmt: skip


def _table(result: dict[str, Any]) -> str:
    """The same for people."""
    parts = result["parts"]
    depths = sorted({len(pipeline) for pipeline in result["pipelines"]})
    lines = [
        f"{result['scenario']}, {result['run']}: plan {result['plan_name']}, "
        f"execution {result['execution']}",
        f"  {result['seconds_per_step']:.2f} s per step of {result['sequences']} sequences, "
        f"{result['tokens_per_s']:.0f} tokens/s",
        f"    {parts['compute_s']:8.2f} s computing (the busiest peer)",
        f"    {parts['waiting_for_links_s']:8.2f} s waiting for links",
        f"    {parts['fill_and_drain_s']:8.2f} s filling and draining the pipeline",
        f"    {parts['reduction_s']:8.2f} s reducing gradients",
        f"    {parts['guarding_s']:8.2f} s until guardians have the gradients",
        f"    {parts['commit_s']:8.2f} s committing",
        f"  {counted(len(result['pipelines']), 'pipeline')} of "
        f"{' or '.join(map(str, depths))} {'stage' if depths == [1] else 'stages'}, "
        f"{counted(len(result['spares']), 'spare')}",
    ]
    return "\n".join(lines)
