"""`p2p-dtfm simulate`: how long a step takes in a scenario, and where the time goes."""

import json
import time
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from p2p_dtfm.cli.app import GlobalBatchOption, LayersOption, app
from p2p_dtfm.cli.terminal.output_files import check_writable, write_text
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.reproduction.named_steps import (
    PlanName,
    StepQuestion,
    named_step,
    question_of,
    recomputing,
)
from p2p_dtfm.sim.scenario.execution import execution_named
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.step_time.timeline import StepTime
from p2p_dtfm.sim.step_time.trace import trace_json

SHOWN_IN_S = 0.1
"""From so many seconds on, a step is shown in seconds; shorter ones in milliseconds."""


class ExecutionName(StrEnum):
    OURS = "ours"
    DTFM = "dtfm"


@app.command()
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
        int | None,
        typer.Option(
            help="With --plan random, of its orders; default: 0, which is the paper's own three "
            "with 64 peers."
        ),
    ] = None,
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
            help="Of all tensors, instead of the run's: fp32, fp16, bf16, int8; of those between "
            "stages alone, rotated6, rotated4 or subspace; of the reduction alone, sparse or sign."
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
    if stages is not None and plan is PlanName.OURS:
        raise UserError(
            "--stages goes with --plan paper, region, random or dtfm",
            "leave it out: our planner finds the stages itself",
        )
    if seed is not None and plan is not PlanName.RANDOM:
        raise UserError("--seed goes with --plan random", "leave it out: nothing else is drawn")
    peers = read_scenario(scenario).with_link_efficiency(link_efficiency)
    from p2p_dtfm.train.model.kinds.registry import with_sizes  # torch, only for this

    spec = with_sizes(read_run_spec(run, layers, global_batch))
    how = execution_named(execution.value, spec.model.layers)
    how = recomputing(how, recompute, spec, plan)
    if codec is not None:
        how = how.with_codec(codec)
    if reduction is not None:
        how = how.with_reduction(reduction)
    question = replace(question_of(peers, spec, how, stages), seed=seed or 0)
    found = named_step(question, plan, trace is not None)
    if trace is not None:
        write_text(trace, json.dumps(trace_json(found.step, question.scenario)), "--trace")
    result = _result(question, plan, found.plan, found.step)
    result["runs_s"] = [total_ns / 1e9 for total_ns in found.all_ns]
    result["elapsed_s"] = round(time.perf_counter() - began, 3)
    typer.echo(json.dumps(result) if as_json else _table(result))


def _result(question: StepQuestion, name: PlanName, plan: Plan, step: StepTime) -> dict[str, Any]:
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
    """The same result as text for people."""
    seconds = result["seconds_per_step"]
    scale, unit = (1, "s") if seconds >= SHOWN_IN_S else (1000, "ms")
    parts = {name: scale * part for name, part in result["parts"].items()}
    depths = sorted({len(pipeline) for pipeline in result["pipelines"]})
    lines = [
        f"{result['scenario']}, {result['run']}: plan {result['plan_name']}, "
        f"execution {result['execution']}",
        f"  {scale * seconds:.2f} {unit} per step of {result['sequences']} sequences, "
        f"{result['tokens_per_s']:.0f} tokens/s",
        f"    {parts['compute_s']:8.2f} {unit} computing (the busiest peer)",
        f"    {parts['waiting_for_links_s']:8.2f} {unit} waiting for links",
        f"    {parts['fill_and_drain_s']:8.2f} {unit} filling and draining the pipeline",
        f"    {parts['reduction_s']:8.2f} {unit} reducing gradients",
        f"    {parts['guarding_s']:8.2f} {unit} until guardians have the gradients",
        f"    {parts['commit_s']:8.2f} {unit} committing",
        f"  {counted(len(result['pipelines']), 'pipeline')} of "
        f"{' or '.join(map(str, depths))} {'stage' if depths == [1] else 'stages'}, "
        f"{counted(len(result['spares']), 'spare')}",
    ]
    return "\n".join(lines)
