"""`p2p-dtfm chaos`: a local swarm of real daemons to which bad things happen, and a verdict."""

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from p2p_dtfm.cli.app import JsonOption, app
from p2p_dtfm.cli.scenarios.chaos_case import (
    FAULTS,
    PEERS,
    SEED,
    STEPS_AFTER,
    ChaosCase,
    chaos_case,
    replayed_case,
)
from p2p_dtfm.cli.scenarios.compared import (
    EMULATED,
    difference_in_words,
    not_compared,
    tell_end,
)
from p2p_dtfm.cli.scenarios.lies import lie_case, lies_summary, play_lies
from p2p_dtfm.cli.scenarios.played_run import bring_weights, run_to_play
from p2p_dtfm.cli.scenarios.storm import KILLS, StormCase, play_storm, storm_summary
from p2p_dtfm.cli.scenarios.storm import PEERS as STORM_PEERS
from p2p_dtfm.cli.scenarios.told_to_end import as_by_ctrl_c
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.shaping import Shape, ShapedLink, ShapedPeer
from p2p_dtfm.testbed.chaos import Chaos
from p2p_dtfm.testbed.chaos_verdict import ChaosVerdict, judge
from p2p_dtfm.testbed.lies.kinds import KINDS
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.plain_losses import (
    NOTHING_SAVED,
    comparable,
    plain_losses,
    why_not_plain,
)
from p2p_dtfm.testbed.recovery.phases import PHASES
from p2p_dtfm.testbed.scenario_swarm import PLAYERS_LIMIT, SHAPE_FILE, cast_scenario
from p2p_dtfm.testbed.swarm_directory import kept_directory, processes_left

RUN = "tiny"
START_S = 120.0
FAULT_LIMIT_S = 90.0
"""What a run may take at most, in seconds for each fault."""


@app.command()
@as_by_ctrl_c()
def chaos(
    scenario: Annotated[
        str | None, typer.Argument(help="A scenario (file or name): its peers, links and faults.")
    ] = None,
    peers: Annotated[
        int | None,
        typer.Option(
            min=3,
            max=PLAYERS_LIMIT,
            help=f"Without a scenario; default: {PEERS}, in a storm {STORM_PEERS}.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help=f"Of the schedule of faults; default: {SEED}.")
    ] = None,
    faults: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            help=f"How many by chance; default: the scenario's own, else {FAULTS}.",
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help=f"Run spec: a file or a name; default: {RUN}.")
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Repeat the run of which this is the JSON object.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="Keep homes, logs and checkpoints in this new directory.")
    ] = None,
    storm: Annotated[
        bool,
        typer.Option("--storm", help="Kill one daemon after another, as soon as it is replaced."),
    ] = False,
    kills: Annotated[
        int | None, typer.Option(min=1, help=f"How many, in a storm; default: {KILLS}.")
    ] = None,
    lie: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:STRENGTH]",
            help="A quarter of the daemons lies, with audits; a STRENGTH for those that have one. "
            f"KIND: {', '.join(KINDS)}.",
        ),
    ] = None,
    liars: Annotated[
        int | None, typer.Option(min=1, help="How many lie; default: a quarter.")
    ] = None,
    apart: Annotated[
        bool,
        typer.Option("--apart", help="Liars that find each other out, rather than colluders."),
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Of audits, while somebody lies; default: mostly 1."),
    ] = None,
    undo: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="What a liar did is undone when it is barred, to so many steps before the proof.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train with real daemons under a seeded schedule of faults, and judge how they bore it."""
    console = Console(stderr=as_json)
    if lie is not None:
        given: dict[str, object] = {
            "a scenario": scenario,
            "--faults": faults,
            "--replay": replay,
            "--kills": kills,
            "--seed": seed,
        }
        _refuse_with_lies(given | {"--storm": storm or None})
        lies = lie_case(run or RUN, lie, peers, rate, liars, together=not apart, undo=undo)
        _end(play_lies(lies, keep, console), console, as_json, lies_summary)
        return
    told: dict[str, object] = {"--liars": liars, "--rate": rate, "--undo": undo}
    _refuse_without_lie(told | {"--apart": apart or None})
    if storm:
        _refuse_with_storm({"a scenario": scenario, "--faults": faults, "--replay": replay})
        storm_seed = SEED if seed is None else seed
        storm_case = StormCase(run or RUN, storm_seed, peers or STORM_PEERS, kills or KILLS)
        _end(play_storm(storm_case, keep, console), console, as_json, storm_summary)
        return
    if kills is not None:
        raise UserError("--kills is for a storm", "add --storm")
    if replay is not None:
        drawn: dict[str, object] = {"a scenario": scenario, "--peers": peers, "--seed": seed}
        refuse_with_replay(drawn | {"--faults": faults, "--run": run})
        case = replayed_case(replay)
    else:
        case = chaos_case(scenario, peers, seed, faults, run or RUN)
    with kept_directory(keep) as directory:
        spec = _write_spec(directory, case)
        report = _run(directory, case, spec, console)
        report["violations"] += (
            [f"{counted(left, 'process')} left"] if (left := processes_left(directory)) else []
        )
    report["ok"] = not report["violations"]
    _end(report, console, as_json, summary)


def _refuse_with_lies(given: dict[str, object]) -> None:
    """Raises `UserError`."""
    for name in _given(given):
        raise UserError(
            f"a lie is played alone: --lie does not go with {name}", "leave one of the two out"
        )


def _refuse_without_lie(given: dict[str, object]) -> None:
    """Raises `UserError`."""
    for name in _given(given):
        raise UserError(f"{name} is for a lie", f"add --lie KIND: {', '.join(KINDS)}")


def _refuse_with_storm(given: dict[str, object]) -> None:
    """Raises `UserError`."""
    for name in _given(given):
        raise UserError(
            f"a storm has no schedule: --storm does not go with {name}", "leave one of the two out"
        )


def refuse_with_replay(given: dict[str, object]) -> None:
    """Raises `UserError`."""
    for name in _given(given):
        raise UserError(
            f"a run is repeated as it was: --replay does not go with {name}",
            "leave one of the two out",
        )


def _given(options: dict[str, object]) -> list[str]:
    """The options that somebody has typed."""
    return [name for name, value in options.items() if value is not None]


def _end(
    report: dict[str, Any],
    console: Console,
    as_json: bool,
    summary: Callable[[Console, dict[str, Any]], None],
) -> None:
    if as_json:
        typer.echo(json.dumps(report))
    summary(console, report)
    if not report["ok"]:
        raise typer.Exit(1)


def _write_spec(directory: Path, case: ChaosCase) -> RunSpec:
    spec = comparable(run_to_play(case.run), case.total_steps)
    (directory / "run.json").write_text(spec.model_dump_json())
    bring_weights(case.run, spec, directory)
    return spec


def _run(directory: Path, case: ChaosCase, spec: RunSpec, console: Console) -> dict[str, Any]:
    timeline: list[dict[str, Any]] = []

    def say(time_s: float, step: int, what: str) -> None:
        timeline.append({"time_s": round(time_s, 2), "step": step, "what": what})
        console.print(f"{time_s:7.1f} s  step {step:4}  {what}", highlight=False)

    with LocalSwarm(directory, ["--threads", "1", "--exit-when-done"]) as swarm:
        arguments, peer_ids, emulated = _cast(directory, case)

        def start_again(name: str, addresses: tuple[str, ...]) -> Child:
            first, *others = addresses
            more = [part for address in others for part in ("--initial-peers", address)]
            return swarm.join(first, [*more, *arguments[name]], name, directory / name)

        _start_all(swarm, directory, case, arguments)
        shape_path = directory / SHAPE_FILE
        runner = Chaos(swarm, shape_path, peer_ids, start_again, say, spec.total_steps)
        limit_s = START_S + FAULT_LIMIT_S * len(case.schedule)
        try:
            wrong = runner.run(case.schedule, STEPS_AFTER, limit_s)
        finally:
            runner.release_all()
    steps = runner.step + 1
    reason = EMULATED if emulated else why_not_plain(spec)
    expected = None if reason else _expected_losses(directory, case, steps)
    verdict = judge(
        runner.histories,
        runner.inflicted,
        steps,
        spec.batch.global_batch,
        expected,
        runner.ends_s,
    )
    verdict.violations[:0] = wrong
    return {
        **_report(case, verdict, timeline),
        **not_compared(reason or ("" if expected else NOTHING_SAVED), verdict.not_looked_at),
        "total_steps": steps,
        "emulated": emulated,
    }


def _start_all(
    swarm: LocalSwarm, directory: Path, case: ChaosCase, arguments: dict[str, tuple[str, ...]]
) -> None:
    founder, *others = case.peers
    run = ["--run", str(directory / "run.json"), "--expect-peers", str(len(case.peers))]
    _, address = swarm.found([*run, *arguments[founder]], founder, directory / founder)
    for name in others:
        swarm.join(address, arguments[name], name, directory / name)


def _cast(
    directory: Path, case: ChaosCase
) -> tuple[dict[str, tuple[str, ...]], dict[str, str], bool]:
    """Arguments and peer ids by name, and whether any device is emulated; writes the shape."""
    path = directory / SHAPE_FILE
    names = (*case.peers, *case.newcomers)
    scenario = case.played()
    if scenario is not None:
        homes = [directory / peer.name for peer in scenario.peers]
        players = cast_scenario(scenario, homes, path)
        ids = {peer.name: peer.peer_id for peer in Shape.load(path).peers}
        arguments = {player.name: player.arguments for player in players}
        return arguments, ids, any(player.emulated for player in players)
    ids = {}
    for name in names:
        home = directory / name
        home.mkdir(mode=0o700)
        ids[name] = Identity.load_or_create(Home(home).identity).peer_id
    shaped = tuple(ShapedPeer(name, peer_id) for name, peer_id in ids.items())
    links = (ShapedLink(one, two, 0, 0) for one, two in itertools.permutations(ids.values(), 2))
    Shape("chaos", shaped, tuple(links)).save(path)
    return dict.fromkeys(names, ("--shape", str(path))), ids, False


def _expected_losses(directory: Path, case: ChaosCase, steps: int) -> Callable[[int], float] | None:
    for name in case.peers:
        if (losses := plain_losses(directory / name, steps)) is not None:
            return losses.__getitem__
    return None


def _report(
    case: ChaosCase, verdict: ChaosVerdict, timeline: list[dict[str, Any]]
) -> dict[str, Any]:
    found = asdict(verdict)
    return {
        "ok": verdict.ok,
        **found,
        "scenario": case.scenario,
        "shaped_links": True,
        "run": case.run,
        "seed": case.seed,
        "peers": list(case.peers),
        "schedule": [asdict(fault) for fault in case.schedule],
        "timeline": timeline,
    }


def _times(times: dict[str, float]) -> tuple[str, str, str]:
    return str(times["count"]), f"{times['median']:.1f} s", f"{times['worst']:.1f} s"


def _print_phases(console: Console, found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print the phases; nothing where no fault stopped a step."""
    if not found:
        return
    table = Table("fault", "times", *PHASES, title="where that time went: median (worst), in s")
    for kind, phases in found.items():
        shown = (f"{phases[it]['median']:.1f} ({phases[it]['worst']:.1f})" for it in PHASES)
        table.add_row(kind, str(phases[PHASES[0]]["count"]), *shown)
    console.print(table)


def summary(console: Console, report: dict[str, Any]) -> None:
    table = Table(
        "fault",
        "times",
        "held up, median",
        "worst",
        "alone",
        "median",
        "worst",
        title="longest time without a commit; of faults that came alone",
    )
    for kind, times in report["recovery_s"].items():
        alone = report["recovery_alone_s"].get(kind)
        table.add_row(kind, *_times(times), *(_times(alone) if alone else ("0", "-", "-")))
    console.print(table)
    _print_phases(console, report["recovery_phases_s"])
    if report["could_not_go_on"]:
        console.print(
            f"during {report['could_not_go_on']} of these nobody had all layers; their time runs "
            "from their end",
            highlight=False,
        )
    console.print(
        f"of steps that failed, {counted(report['kept_microbatches'], 'microbatch')} kept at their "
        f"stages, {report['redone_microbatches']} redone",
        highlight=False,
    )
    console.print(
        f"{report['committed_steps']} of {report['total_steps']} steps committed in "
        f"{counted(report['views'], 'view')}, a usual one took {report['usual_step_s']:.2f} s; "
        f"goodput {report['goodput']:.0%}",
        highlight=False,
    )
    console.print(
        f"samples lost {report['lost_samples']}, counted twice {report['duplicated_samples']}; "
        f"steps given up by one side of a split {report['given_up_steps']}, "
        f"most repeated after a failure {report['repeated_steps']}; largest loss "
        f"difference to an undisturbed run in one process {difference_in_words(report)}",
        highlight=False,
        markup=False,
    )
    tell_end(console, report)
