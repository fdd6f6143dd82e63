"""`p2p-dtfm plan SCENARIO`: plans of swarms that need not exist."""

import json
import shlex
import sys
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import typer

from p2p_dtfm.cli.terminal.output_files import check_writable, write_text
from p2p_dtfm.cli.terminal.progress import plans_made
from p2p_dtfm.core.planner.explain import explain
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.sim.advice.hiring import HOUR_S, hire, price_per_hour
from p2p_dtfm.sim.map.plan_map import plan_html, plan_svg
from p2p_dtfm.sim.paper.cost import PAPER_SIZES, PaperSizes
from p2p_dtfm.sim.paper.scenario_problem import paper_problem_of, sizes_of
from p2p_dtfm.sim.paper.solver import solve_paper
from p2p_dtfm.sim.reproduction.bilevel import bilevel_svg
from p2p_dtfm.sim.reproduction.swarm.swarm_bars import SwarmQuestion, swarm_bars
from p2p_dtfm.sim.reproduction.swarm.swarm_page import STYLE, charts_html
from p2p_dtfm.sim.scenario.execution import AS_RUN, OURS
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import on_the_wire, scenario_snapshot, workload_in
from p2p_dtfm.sim.scenario.what_if import what_if

DEFAULT_RUN = "gpt3-xl"
PAPER_STAGES = 8


class Objective(StrEnum):
    SPEED = "speed"
    COST = "cost"


class Cost(StrEnum):
    STEP = "step"
    PAPER = "paper"


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """What is asked of `plan SCENARIO`."""

    scenario: str
    run: str | None
    layers: int | None
    global_batch: int | None
    cost: Cost
    stages: int
    replicas: int | None
    change: str | None
    explained: bool
    as_json: bool
    svg: Path | None
    html: Path | None
    graphml: Path | None = None
    objective: Objective = Objective.SPEED


def plan_scenario(question: PlanQuestion) -> None:
    """Print the plan of a scenario; write its picture if asked. Raises `UserError`."""
    scenario = read_scenario(question.scenario)
    if question.cost is Cost.PAPER:
        if question.objective is Objective.COST:
            raise UserError(
                "--objective cost is of plans by seconds per step", "leave out --cost paper"
            )
        if question.html or question.graphml or question.explained:
            raise UserError(
                "--explain, --html and --graphml show plans of the step-time planner",
                "leave out --cost paper, or draw its two levels with --svg",
            )
        check_writable(question.svg, "--svg")
        changed = what_if(scenario, question.change) if question.change is not None else scenario
        result = _paper_result(changed, question)
        typer.echo(json.dumps(result) if question.as_json else _paper_text(result))
        return
    _plan_step(scenario, question)


def _paper_result(scenario: Scenario, question: PlanQuestion) -> dict[str, Any]:
    began = time.perf_counter()
    sizes = _paper_sizes(scenario, question)
    replicas = question.replicas or len(scenario.peers) // question.stages
    problem = paper_problem_of(scenario, question.stages, replicas, sizes)
    found = solve_paper(problem)
    elapsed = time.perf_counter() - began
    if question.svg is not None:
        write_text(question.svg, bilevel_svg(scenario, problem, found), "--svg")
    return {
        "total_s": found.total_ns / SECOND_NS,
        "data_parallel_s": found.data_parallel_ns / SECOND_NS,
        "pipeline_s": found.pipeline_ns / SECOND_NS,
        "stages": [list(group) for group in found.stages],
        "sizes": {
            "of": sizes.name,
            "gradient_bytes_per_stage": sizes.gradient_bytes_per_stage(question.stages),
            "activation_bytes_per_link": sizes.activation_bytes_per_link(replicas),
        },
        "elapsed_s": round(elapsed, 3),
        "snapshot": problem.digest(),
        "plan": found.digest(),
    }


def _paper_sizes(scenario: Scenario, question: PlanQuestion) -> PaperSizes:
    """The sizes of the run, or the paper's own if no run is asked for. Raises `UserError`."""
    asked = question.layers is not None or question.global_batch is not None
    if question.run == PAPER_SIZES.name and asked:
        raise UserError(
            "the paper's constants are of one model and one batch: --layers and --global-batch "
            "change nothing of them",
            "name the run whose sizes are to count, such as --run gpt3-xl",
        )
    if question.run == PAPER_SIZES.name or (question.run is None and not asked):
        return PAPER_SIZES
    from p2p_dtfm.train.model.kinds.registry import with_sizes  # torch, only for this

    spec = with_sizes(
        read_run_spec(question.run or DEFAULT_RUN, question.layers, question.global_batch)
    )
    return sizes_of(spec.name, on_the_wire(workload_in(scenario, spec, OURS), OURS))


def _paper_text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['total_s']:.6f} s = {result['data_parallel_s']:.6f} s data parallel + "
        f"{result['pipeline_s']:.6f} s pipeline, found in {result['elapsed_s']} s",
        f"sizes of {result['sizes']['of']}: "
        f"{bytes_text(result['sizes']['gradient_bytes_per_stage'])} of gradients a stage, "
        f"{bytes_text(result['sizes']['activation_bytes_per_link'])} of activations a link",
    ]
    for number, group in enumerate(result["stages"], 1):
        lines.append(f"stage {number}: {' '.join(group)}")
    return "\n".join(lines)


def _plan_step(scenario: Scenario, question: PlanQuestion) -> None:
    from p2p_dtfm.train.model.kinds.registry import with_sizes  # torch, only for this

    spec = with_sizes(
        read_run_spec(question.run or DEFAULT_RUN, question.layers, question.global_batch)
    )

    pictures = ((question.svg, "--svg"), (question.html, "--html"), (question.graphml, "--graphml"))
    for path, option in pictures:
        check_writable(path, option)
    asked_for = question
    hired: dict[str, Any] = {}
    if question.objective is Objective.COST:
        asked = what_if(scenario, question.change) if question.change is not None else scenario
        scenario, hired = _worth_their_price(asked, spec)
        question = replace(question, change=None)
    shown = what_if(scenario, question.change) if question.change is not None else scenario
    result, snapshot, found = _step_result(scenario, spec)
    if question.change is not None:
        changed, snapshot, found = _step_result(shown, spec)
        result = {"before": result, **changed, "what_if": question.change}
    result |= hired
    explanation = explain(snapshot, found) if question.explained else None
    if explanation is not None:
        result["explanation"] = msgspec.to_builtins(explanation)
    if question.svg is not None:
        write_text(question.svg, plan_svg(found, shown, snapshot.workload), "--svg")
    if question.html is not None:
        result["bars"] = _write_page(asked_for, shown, spec, snapshot, found)
    if question.graphml is not None:
        write_graph(question.graphml, snapshot, found)
    if question.as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(_step_text(result))
    if explanation is not None:
        typer.echo(explanation.text())


def _write_page(
    question: PlanQuestion, swarm: Scenario, spec: RunSpec, snapshot: Snapshot, plan: Plan
) -> list[dict[str, Any]]:
    """Write the scenario's own page; returns its bars as data."""
    assert question.html is not None
    plainly = question.change is None and question.objective is Objective.SPEED
    asked = SwarmQuestion(
        swarm, spec, snapshot, plan, command=f"p2p-dtfm plan {_typed(question)}",
        simulated_by=f"p2p-dtfm simulate {_typed(question)}" if plainly else None,
    )  # fmt: skip
    found = swarm_bars(asked, _tell)
    page = plan_html(plan, swarm, snapshot.workload, charts_html(found), STYLE)
    write_text(question.html, page, "--html")
    return [msgspec.to_builtins(bar) for bar in found.bars]


def _typed(question: PlanQuestion) -> str:
    """Scenario and run, as the commands that plan or simulate them take them."""
    words = [question.scenario, "--run", question.run or DEFAULT_RUN]
    for option, value in (
        ("--layers", question.layers),
        ("--global-batch", question.global_batch),
        ("--what-if", question.change),
    ):
        words += [option, str(value)] if value is not None else []
    if question.objective is Objective.COST:
        words += ["--objective", "cost"]
    return shlex.join(words)


def _tell(what: str) -> None:
    """Say on a terminal that a page is made: it takes from a second to minutes."""
    if sys.stderr.isatty():
        print(f"\r\x1b[Kthe page: {what}", end="\r", file=sys.stderr, flush=True)


def write_graph(path: Path, snapshot: Snapshot, made: Plan | NoPlan) -> None:
    """Peers, places and measured links for other programs. Raises `UserError`."""
    from p2p_dtfm.sim.map.swarm_graph import graphml, swarm_graph  # networkx takes a while

    graph = swarm_graph(snapshot, made if isinstance(made, Plan) else None)
    write_text(path, graphml(graph), "--graphml")


def _worth_their_price(scenario: Scenario, spec: RunSpec) -> tuple[Scenario, dict[str, Any]]:
    """The peers that make the most tokens for a dollar, and what is to be said about it."""
    best, fastest = hire(scenario, spec, plans_made("swarms"))
    names = {peer.name for peer in best.scenario.peers}
    told = {
        "objective": "cost",
        "left_out": [peer.name for peer in scenario.peers if peer.name not in names],
        "fastest": {
            "tokens_per_s": round(fastest.tokens_per_s, 1),
            "price_per_hour": round(fastest.price_per_hour, 6),
            "tokens_per_dollar": round(fastest.tokens_per_dollar),
            "peers": len(fastest.scenario.peers),
        },
    }
    return best.scenario, told


def _step_result(scenario: Scenario, spec: RunSpec) -> tuple[dict[str, Any], Snapshot, Plan]:
    snapshot = scenario_snapshot(scenario, spec, AS_RUN)
    began = time.perf_counter()
    found = compute_plan(snapshot)
    elapsed = time.perf_counter() - began
    if isinstance(found, NoPlan):
        raise UserError(f"{scenario.name}: {found.reason}", "add peers or memory, or train less")
    step_s = found.predicted_step_ns / SECOND_NS
    result = {
        "seconds_per_step": step_s,
        "tokens_per_s": round(spec.tokens_per_step / step_s, 1),
        "peers": len(scenario.peers),
        "pipelines": [
            {
                "microbatches": pipeline.microbatch_count,
                "stages": [
                    {
                        "peer": stage.peer_id,
                        "first_layer": stage.first_layer,
                        "end_layer": stage.end_layer,
                        "in_flight": stage.in_flight,
                    }
                    for stage in pipeline.stages
                ],
                **({"codecs": list(pipeline.codecs)} if pipeline.codecs else {}),
            }
            for pipeline in found.pipelines
        ],
        "spares": list(found.spares),
        "elapsed_s": round(elapsed, 3),
        "snapshot": snapshot.digest(),
        "plan": found.digest(),
    }
    if any(peer.price_micro_per_hour for peer in scenario.peers):
        price = price_per_hour(scenario, found)
        result["price_per_hour"] = round(price, 6)
        result["tokens_per_dollar"] = (
            round(spec.tokens_per_step * HOUR_S / step_s / price) if (price) else None
        )
    return result, snapshot, found


def _row(pipeline: dict[str, Any]) -> str:
    """The pipeline's stages, with the codecs of each boundary if the planner has chosen them."""
    first, *others = (
        f"{stage['peer']} [{stage['first_layer']}-{stage['end_layer'] - 1}]"
        for stage in pipeline["stages"]
    )
    chosen = pipeline.get("codecs", [("", "")] * len(others))
    arrows = [there if there == back else f"{there}/{back}" for there, back in chosen]
    pairs = zip(arrows, others, strict=True)
    return first + "".join(f" →{codecs} {stage}" for codecs, stage in pairs)


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{1000 * seconds:.3f} ms"


def _step_text(result: dict[str, Any]) -> str:
    lines = [
        f"{_seconds_text(result['seconds_per_step'])} a step, "
        f"{result['tokens_per_s']:.0f} tokens/s predicted; planned in {result['elapsed_s']} s"
    ]
    if "before" in result:
        before = result["before"]["seconds_per_step"]
        after = result["seconds_per_step"]
        percent = f"{100 * abs(after / before - 1):.1f}%"
        change = f"{percent} {'shorter' if after < before else 'longer'}, {after:.3f} s instead of "
        change = "as long as before" if percent == "0.0%" else f"{change}{before:.3f} s"
        spares = [len(each["spares"]) for each in (result["before"], result)]
        lines.append(
            f"what if {result['what_if']}: a step is {change}, with "
            f"{counted(result['peers'], 'peer')} instead of {result['before']['peers']} "
            f"({spares[1]} of them spares, "
            f"before {spares[0]})"
        )
    if result.get("tokens_per_dollar"):
        lines.append(
            f"{result['price_per_hour']:.2f} dollars an hour, "
            f"{result['tokens_per_dollar'] / 1e6:.1f} million tokens for a dollar"
        )
    if "fastest" in result:
        fastest = result["fastest"]
        lines.append(
            f"left out: {' '.join(result['left_out']) or 'nobody'}; the fastest plan that was "
            f"found: {fastest['tokens_per_s']:.0f} tokens/s with "
            f"{counted(fastest['peers'], 'peer')}, {fastest['tokens_per_dollar'] / 1e6:.1f} "
            f"million tokens for a dollar"
        )
    lines.append("pipelines, with the layers that each peer holds:")
    for number, pipeline in enumerate(result["pipelines"], 1):
        lines.append(
            f"pipeline {number}, "
            f"{counted(pipeline['microbatches'], 'microbatch')}: {_row(pipeline)}"
        )
    if result["spares"]:
        lines.append(f"spares: {' '.join(result['spares'])}")
    return "\n".join(lines)
