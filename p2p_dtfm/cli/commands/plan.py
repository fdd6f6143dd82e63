"""`p2p-dtfm plan`: the plan of the live swarm or of a scenario, and why it is as it is."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from p2p_dtfm.cli.app import GlobalBatchOption, HomeOption, JsonOption, LayersOption, app
from p2p_dtfm.cli.commands.swarm import IN_NO_VIEW, IdsOption, how_to_call
from p2p_dtfm.cli.scenarios.advise import AdviceWish, advise_on
from p2p_dtfm.cli.scenarios.plan_scenario import (
    DEFAULT_RUN,
    PAPER_STAGES,
    Cost,
    Objective,
    PlanQuestion,
    plan_scenario,
    write_graph,
)
from p2p_dtfm.cli.terminal.output_files import check_writable
from p2p_dtfm.cli.terminal.plain import harmless_lines, plain
from p2p_dtfm.cli.terminal.plan_table import plan_table
from p2p_dtfm.core.planner.explain import explain
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.names import distinct
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.daemon.machine.local_client import call_daemon

OF_SCENARIOS = (
    *("cost", "run", "layers", "global_batch", "stages", "replicas"),
    *("what_if", "svg", "html", "objective"),
)
"""Options that have no meaning for a swarm."""
OF_DAEMON = ("home", "ids")
"""Options that have no meaning for a scenario."""
NOT_OF_ADVICE = ("cost", "stages", "replicas", "objective", "explained", "svg", "html", "graphml")
"""Options of a single plan; advice makes many plans."""
OF_PAPER = ("stages", "replicas")


@app.command()
def plan(
    context: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Argument(help="Scenario file or name; without one, the swarm of this daemon."),
    ] = None,
    explained: Annotated[
        bool, typer.Option("--explain", help="Say why each peer holds what it holds.")
    ] = False,
    cost: Annotated[
        Cost, typer.Option(help="step: seconds per step; paper: DT-FM's own cost.")
    ] = Cost.STEP,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            help="Run spec file or name, with a scenario: gpt3-xl if none is given. With --cost "
            "paper: the sizes that it counts; paper, or none: the paper's own constants.",
        ),
    ] = None,
    layers: LayersOption = None,
    global_batch: GlobalBatchOption = None,
    stages: Annotated[
        int | None, typer.Option(min=1, help="With --cost paper; left out: 8.")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="With --cost paper; left out: as many as the peers make."),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option("--what-if", help='"+3 london", "-oregon-2", or several with commas.'),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(help="Write a map of the scenario's plan; with --cost paper its two levels."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the map as a page.")] = None,
    graphml: Annotated[
        Path | None, typer.Option(help="Write peers and links as GraphML, of a swarm or scenario.")
    ] = None,
    advise: Annotated[
        bool,
        typer.Option("--advise", help="Look for a run spec that suits the scenario better."),
    ] = False,
    vary: Annotated[
        str | None,
        typer.Option(
            help="With --advise, what may be changed: global-batch, inner-steps, reduction, "
            "boundaries, microbatch, optimizer, context; all but the last two without it."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --advise: write that run spec to a new file.")
    ] = None,
    objective: Annotated[
        Objective,
        typer.Option(help="speed; or cost: the peers of a scenario that make most for a dollar."),
    ] = Objective.SPEED,
    home: HomeOption = None,
    as_json: JsonOption = False,
    ids: IdsOption = False,
) -> None:
    """The plan in force in the swarm of this machine's daemon, or the plan for a scenario."""
    if scenario is not None:
        _refuse_of_daemon(context)
    if advise or vary is not None or out is not None:
        if scenario is None or not advise:
            raise UserError(
                "--advise looks for a run spec for a scenario; --vary and --out go with it",
                "write p2p-dtfm plan SCENARIO --run FILE --advise",
            )
        _refuse_advised(context)
        advise_on(
            AdviceWish(scenario, run or DEFAULT_RUN, layers, global_batch, what_if),
            vary,
            out,
            as_json,
        )
        return
    if scenario is not None:
        if cost is not Cost.PAPER:
            _refuse_stepwise(context)
        plan_scenario(
            PlanQuestion(
                scenario, run, layers, global_batch, cost, stages or PAPER_STAGES, replicas,
                what_if, explained, as_json, svg, html, graphml, objective,
            )
        )  # fmt: skip
        return
    _require_scenario(context)
    _plan_in_force(home, explained, graphml, as_json, ids)


def _require_scenario(context: typer.Context) -> None:
    """Raises `UserError` for an option that would be ignored."""
    for option in _given(context, OF_SCENARIOS):
        raise UserError(
            f"{option} goes with a scenario, and none is named",
            (
                f"write p2p-dtfm plan SCENARIO {option} ...",
                "the swarm of this daemon is drawn on its page: p2p-dtfm dashboard",
            ),
        )


def _refuse_of_daemon(context: typer.Context) -> None:
    """Raises `UserError` for an option that would be ignored. A home that the environment names for
    other commands does not count as one."""
    for name in OF_DAEMON:
        option = f"--{name}"
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise UserError(
                f"{option} is of the swarm of a daemon, and a scenario is named",
                "leave out one of the two",
            )


def _refuse_advised(context: typer.Context) -> None:
    """Raises `UserError` for an option that would be ignored."""
    for option in _given(context, NOT_OF_ADVICE):
        raise UserError(
            f"{option} is of plans, and --advise looks for a run spec",
            f"write one with --out FILE, then p2p-dtfm plan SCENARIO --run FILE {option} ...",
        )


def _refuse_stepwise(context: typer.Context) -> None:
    """Raises `UserError` for an option that would be ignored."""
    for option in _given(context, OF_PAPER):
        raise UserError(
            f"{option} goes with --cost paper",
            "leave it out: the planner finds stages and pipelines itself",
        )


def _given(context: typer.Context, names: Iterable[str]) -> Iterator[str]:
    """Those options whose value is not their default."""
    options = {option.name: option for option in context.command.params}
    for name in names:
        if context.params[name] != options[name].default:
            yield options[name].opts[0]


def _plan_in_force(
    home: Path | None, explained: bool, graphml: Path | None, as_json: bool, ids: bool
) -> None:
    """Print the plan in force in the swarm of this machine's daemon."""
    check_writable(graphml, "--graphml")
    facts = call_daemon(home, "plan")
    if facts["view"] is None:
        typer.echo(json.dumps(facts) if as_json else IN_NO_VIEW)
        return
    snapshot = msgspec.convert(facts["snapshot"], Snapshot, strict=False)
    made = msgspec.convert(facts["plan"], Plan | NoPlan)
    if graphml is not None:
        write_graph(graphml, snapshot, made)
    explanation = explain(snapshot, made) if explained and isinstance(made, Plan) else None
    if as_json:
        if explanation is not None:
            facts["explanation"] = msgspec.to_builtins(explanation)
        typer.echo(json.dumps(facts))
        return
    console = Console()
    console.print(
        f"view {facts['view']}: snapshot {facts['snapshot_digest'][:16]}, "
        f"plan {facts['plan_digest'][:16]}",
        highlight=False,
    )
    if isinstance(made, NoPlan):
        console.print(f"no training: {plain(made.reason)}", markup=False, highlight=False)
        return
    called = distinct({record.peer_id: record.called for record in snapshot.records})
    named = how_to_call(called, ids)
    console.print(plan_table(made, named, console.width))
    if explanation is not None:
        text = harmless_lines(named(explanation.text()))
        console.print(Text(text), highlight=False, soft_wrap=True)
