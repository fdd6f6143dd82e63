"""`p2p-dtfm demo`: a swarm of real daemons on this machine that trains, shows itself, and ends."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2p_dtfm.cli.app import JsonOption, app
from p2p_dtfm.cli.commands.data import tokenizer_of
from p2p_dtfm.cli.commands.offline.newest_model import newest_checkpoint
from p2p_dtfm.cli.scenarios.played_run import bring_weights, playable, run_to_play
from p2p_dtfm.cli.scenarios.told_to_end import as_by_ctrl_c
from p2p_dtfm.cli.terminal.plain import harmless_lines
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted, duration, share_text
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.daemon.dashboard.report_file import next_commands
from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.sim.scenario.files import find_run_spec, read_scenario
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.scenario_swarm import SHAPE_FILE, PlayedPeer, cast_scenario, threads_of
from p2p_dtfm.testbed.swarm_directory import kept_directory, processes_left

POLL_S = 0.5
LATE_AT = 0.3
"""The late joiner starts when this fraction of the steps is committed."""
STEPS_FOR_LATE_JOINER = 100
"""A joiner takes seconds to start and measure; a shorter demo may be over before it trains."""
PLAIN_LINE_EVERY_S = 5.0
SECONDS_LIMIT = 3600.0
RECIPES = {"speedrun": "tiny-speedrun"}
"""The packaged run spec of each recipe."""


@app.command()
@as_by_ctrl_c()
def demo(
    peers: Annotated[
        int | None, typer.Option(min=1, max=32, help="Daemons to start; default: 4.")
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(help="Play this scenario (file or name): its peers, over its links."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps, instead of the run spec's.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Run spec: a file or a name; default: tiny.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="speedrun: as much text a step as tiny, and a lower loss in a minute."),
    ] = None,
    late: Annotated[
        int | None,
        typer.Option(min=0, help="How many join mid-run; default: 1, 0 if the run is short."),
    ] = None,
    audit: Annotated[
        float | None,
        typer.Option(
            min=0.0001,
            max=1.0,
            help="With audits of so large a part of all works: p2p-dtfm verify.",
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep homes, logs and checkpoints in this new directory.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train with several real daemons on this machine, and show how it goes."""
    console = Console(stderr=as_json)
    with kept_directory(keep) as directory:
        spec_path, total_steps = _spec_file(directory, _chosen_run(run, recipe), steps, audit)
        if late is None:
            late = 1 if total_steps >= STEPS_FOR_LATE_JOINER and scenario is None else 0
        with LocalSwarm(directory) as swarm:
            players = _cast(swarm, scenario, peers, console)
            late = min(late, len(players) - 1)
            expected = ["--expect-peers", str(len(players) - late)]
            founder, *others = players
            run_arguments = ["--run", str(spec_path), *expected, *founder.arguments]
            first, address = swarm.found(run_arguments, founder.name)
            _tell_dashboard(console, first)

            def join(player: PlayedPeer) -> None:
                swarm.join(address, player.arguments, player.name)

            for player in others[: len(others) - late]:
                join(player)
            _watch(swarm, join, others[len(others) - late :], console)
        result = _result(swarm)
        left = processes_left(directory)
        emulated = any(player.emulated for player in players)
        sample = None if emulated else _sample(swarm.children[0])
    result["processes_left"] = left
    result |= {"scenario": scenario, "shaped_links": scenario is not None, "emulated": emulated}
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _summary(console, result, sample, keep)
    if left or not result["agreed"]:
        raise typer.Exit(1)


def _cast(
    swarm: LocalSwarm, scenario_name: str | None, peers: int | None, console: Console
) -> list[PlayedPeer]:
    """Which daemon plays which peer. Raises `UserError`."""
    if scenario_name is None:
        homes = [swarm.home(number) for number in range(4 if peers is None else peers)]
        players = [PlayedPeer(home.name, home, (), emulated=False) for home in homes]
    else:
        if peers is not None:
            raise UserError("a scenario says which peers there are", "leave out --peers")
        scenario = read_scenario(scenario_name)
        homes = [swarm.home(number) for number in range(len(scenario.peers))]
        players = cast_scenario(scenario, homes, swarm.directory / SHAPE_FILE)
        about = harmless_lines(scenario.description or "no description")
        console.print(f"{scenario.name}: {about}", markup=False)
        if scenario.faults:
            console.print("  its faults are not played here: see p2p-dtfm chaos")
    shared = ("--threads", str(threads_of(players)), "--exit-when-done")
    return [replace(player, arguments=(*shared, *player.arguments)) for player in players]


def _chosen_run(run: str | None, recipe: str | None) -> str:
    """The run spec that is meant. Raises `UserError`."""
    if recipe is None:
        return run or "tiny"
    if recipe not in RECIPES:
        raise UserError(
            f"there is no recipe {recipe!r}", f"choose {', '.join(RECIPES)}, or leave it out"
        )
    if run is not None:
        raise UserError("a recipe is a run spec by itself", "leave out --run, or --recipe")
    return RECIPES[recipe]


def _spec_file(
    directory: Path, run: str, steps: int | None, audit: float | None
) -> tuple[Path, int]:
    """The run spec as a file, with another number of steps and audits if given; and its steps.
    Raises `UserError`."""
    path = find_run_spec(run)
    spec = playable(path)
    if steps is None and audit is None:
        return path.absolute(), spec.total_steps
    values = run_to_play(run).model_dump(mode="json")
    if steps is not None:
        values["total_steps"] = steps
    if audit is not None:
        values["audit"] = {"rate": audit}
    changed = parse_run_spec(values, f"{spec.name} with --audit" if audit else spec.name)
    target = directory / f"{spec.name}.json"
    target.write_text(changed.model_dump_json())
    bring_weights(run, changed, directory)
    return target, changed.total_steps


def _tell_dashboard(console: Console, child: Child) -> None:
    """Say where the founder can be watched; a terminal makes a link of it."""
    invitation = ask_daemon(child.home, "dashboard")
    if invitation and invitation["address_with_token"]:
        console.print(
            f"watch {child.name}: {invitation['address_with_token']}",
            highlight=False,
            soft_wrap=True,
        )


# while it runs -----------------------------------------------------------------------------------


def _watch(
    swarm: LocalSwarm, join: Callable[[PlayedPeer], None], late: list[PlayedPeer], console: Console
) -> None:
    began_s = time.monotonic()
    with _display(console) as show:
        while any(child.running for child in swarm.children):
            statuses = [child.status() if child.running else None for child in swarm.children]
            failed = [c for c in swarm.children if not c.running and c.process.returncode != 0]
            if failed:
                raise _failure(failed[0])
            lead = max((s for s in statuses if s), key=lambda s: s.get("step") or 0, default=None)
            progress = _progress(lead)
            if late and progress >= LATE_AT:
                join(late.pop())
            if time.monotonic() - began_s > SECONDS_LIMIT:
                raise UserError(
                    f"the demo did not end within {duration(SECONDS_LIMIT)}",
                    "try fewer --steps",
                    exit_code=1,
                )
            show(swarm.children, statuses, lead, progress)
            time.sleep(POLL_S)
    failed = [child for child in swarm.children if child.process.returncode != 0]
    if failed:
        raise _failure(failed[0])


def _progress(lead: dict[str, Any] | None) -> float:
    if lead is None or not lead.get("total_steps"):
        return 0.0
    return float((lead.get("step") or 0) / lead["total_steps"])


def _failure(child: Child) -> UserError:
    return UserError(
        f"{child.name} ended with code {child.process.returncode}; its last lines:\n"
        f"{child.log_tail()}",
        "run again with --keep DIR to keep all logs",
        exit_code=1,
    )


@contextmanager
def _display(console: Console) -> Iterator[Any]:
    """A live table on a terminal, a line now and then otherwise."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield lambda *facts: live.update(_table(*facts))
        return
    last_s = last_progress = 0.0

    def plain(
        children: list[Child],
        statuses: list[dict[str, Any] | None],
        lead: dict[str, Any] | None,
        progress: float,
    ) -> None:
        nonlocal last_s, last_progress
        if lead is None or time.monotonic() - last_s < PLAIN_LINE_EVERY_S or last_progress == 1.0:
            return
        last_s, last_progress = time.monotonic(), progress
        console.print(_headline(lead, progress), highlight=False, soft_wrap=True)

    yield plain


def _headline(lead: dict[str, Any], progress: float) -> str:
    loss, held_out = lead.get("loss"), lead.get("held_out_loss")
    parts = [
        f"step {lead.get('step') or 0}/{lead.get('total_steps') or '?'} ({share_text(progress)})"
    ]
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if held_out is not None:
        parts.append(f"held-out {held_out:.3f}")
    if lead.get("tokens_per_s"):
        parts.append(f"{lead['tokens_per_s']:,.0f} tokens/s")
    parts.append(f"{counted(len(lead['members']), 'peer')} in view {lead['view'] or '-'}")
    if lead.get("eta_s") is not None:
        parts.append(f"{duration(lead['eta_s'])} left")
    return " · ".join(parts)


def _table(
    children: list[Child],
    statuses: list[dict[str, Any] | None],
    lead: dict[str, Any] | None,
    progress: float,
) -> Group:
    table = Table("daemon", "peer", "state", "layers", "why", expand=True)
    for child, facts in zip(children, statuses, strict=False):
        if facts is None:
            table.add_row(child.name, "", "starting" if child.running else "ended", "", "")
            continue
        layers = facts["layers"]
        span = f"{layers[0]}-{layers[-1]}" if layers else "none"
        table.add_row(child.name, facts["name"], facts["state"], span, facts["reason"])
    bar = ProgressBar(total=1.0, completed=progress)
    headline = Text(_headline(lead, progress) if lead else "the daemons start")
    return Group(headline, bar, table)


# at the end --------------------------------------------------------------------------------------


def _result(swarm: LocalSwarm) -> dict[str, Any]:
    """What happened, read from the histories that the daemons wrote."""
    events = [child.events() for child in swarm.children]
    steps = [e for e in events[0] if e["event"] == "step" and e["loss"] is not None]
    held_out = [e for e in events[0] if e["event"] == "step" and e["held_out_loss"] is not None]
    views = [e for e in events[0] if e["event"] == "view"]
    if not steps or not held_out or not views:
        raise UserError("the swarm committed no step", "run again with --keep DIR", exit_code=1)
    tokens = read_run_spec_of(swarm.children[0]).tokens_per_step
    seconds = steps[-1]["time_s"] - steps[0]["time_s"]
    return {
        "held_out_loss": held_out[-1]["held_out_loss"],
        "steps": len(steps),
        "peers": len(swarm.children),
        "tokens_per_s": round((len(steps) - 1) * tokens / seconds, 1) if seconds else None,
        "views": [
            {key: view[key] for key in ("view", "step", "members", "snapshot", "plan")}
            for view in views
        ],
        "snapshot": views[-1]["snapshot"],
        "plan": views[-1]["plan"],
        "first_loss": steps[0]["loss"],
        "last_loss": steps[-1]["loss"],
        "training_s": round(seconds, 1),
        "agreed": _agreed(events),
    }


def read_run_spec_of(child: Child) -> RunSpec:
    """The run spec that a daemon trained, from its checkpoint."""
    from p2p_dtfm.train.model.checkpoint import read_manifest

    return read_manifest(newest_checkpoint(child.home)).spec()


def _agreed(events: list[list[dict[str, Any]]]) -> bool:
    """Whether all peers saw the same snapshot and plan in each view, and equal losses."""
    seen: dict[tuple[str, int], set[Any]] = {}
    for history in events:
        for event in history:
            if event["event"] == "view":
                key, value = ("view", event["view"]), (event["snapshot"], event["plan"])
            else:
                key, value = ("step", event["step"]), (event["loss"], event["held_out_loss"])
            seen.setdefault(key, set()).add(value)
    return all(len(values) == 1 for values in seen.values())


def _sample(child: Child) -> str | None:
    """A text that the model writes; None for a run whose layers need not write text."""
    from p2p_dtfm.train.model.generate import generate

    if read_run_spec_of(child).layers:
        return None
    checkpoint = newest_checkpoint(child.home)
    return generate(checkpoint, tokenizer_of(checkpoint), "def ", 240, 0.7, 1)


def _summary(
    console: Console, result: dict[str, Any], sample: str | None, keep: Path | None
) -> None:
    if result["shaped_links"]:
        console.print(
            f"\n[bold]shaped links[/bold] of {result['scenario']}: all figures below are of one "
            "machine that imitates them",
            highlight=False,
        )
    if result["emulated"]:
        console.print(
            "[bold]emulated devices[/bold]: they take the time and compute nothing, so the losses "
            "mean nothing",
            highlight=False,
        )
    rate = result["tokens_per_s"]
    console.print(
        f"\n[bold]{counted(result['steps'], 'step')}[/bold] by "
        f"{counted(result['peers'], 'peer')} in {duration(result['training_s'])}: loss "
        f"{result['first_loss']:.3f} → "
        f"{result['last_loss']:.3f}, held-out [bold]{result['held_out_loss']:.3f}[/bold] nats per "
        f"token{'' if rate is None else f', {rate:,.0f} tokens/s'}",
        highlight=False,
        soft_wrap=True,
    )
    for view in result["views"]:
        console.print(
            f"  view {view['view']} from step {view['step']}: "
            f"{counted(len(view['members']), 'peer')}, snapshot {view['snapshot'][:12]}, plan "
            f"{view['plan'][:12]}",
            highlight=False,
        )
    same = "the same" if result["agreed"] else "[red]NOT the same[/red]"
    console.print(f"  all peers logged {same} snapshots, plans and losses")
    console.print(f"  processes left behind: {result['processes_left']}")
    if keep is not None:
        console.print(f"  homes, logs and checkpoints: {keep}")
    _say_next(console, keep, writes=sample is not None or result["emulated"])
    if sample is None:
        return
    _say_sample(console, sample)


def _say_sample(console: Console, sample: str) -> None:
    console.print("\n[bold]what the model writes now[/bold] (from 'def '):")
    console.print(harmless_lines(sample), markup=False, highlight=False, soft_wrap=True)


def _say_next(console: Console, keep: Path | None, writes: bool) -> None:
    """What to try after this."""
    home = None if keep is None else next(iter(sorted(keep.glob("*/runs"))), None)
    commands = next_commands(home.parent) if home is not None and writes else ()
    lines = [f"  {line}" for line in commands]
    if home is not None:
        lines += [f"  {path}" for path in sorted(home.glob("*/report.html"))]
    else:
        lines = ["  p2p-dtfm demo --keep DIR     keeps the model, a report and all logs"]
    lines.append("  p2p-dtfm --run tiny          trains it for real: friends join with one line")
    lines.append(
        "  p2p-dtfm chaos               kills peers while they train, and counts what is lost"
    )
    console.print("\n[bold]what to try next[/bold]")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
