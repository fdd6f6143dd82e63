"""`p2p-dtfm chaos --lie KIND`: a quarter of a swarm with audits lies, and the others are judged."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from p2p_dtfm.cli.scenarios.compared import difference_in_words
from p2p_dtfm.cli.scenarios.played_run import bring_weights, run_to_play
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.lies.kinds import KINDS, WITH_STRENGTH
from p2p_dtfm.testbed.lies.played import LieCase, play
from p2p_dtfm.testbed.swarm_directory import kept_directory, processes_left

PEERS = 4
PIPELINE_PEERS = 6
"""Three pipelines of two stages: two other members compute the work of each stage again."""
LEAST_STRENGTH, MOST_STRENGTH = 1e-6, 1e30
STAYS = "the steps in which it lied and that nobody drew"


def lie_case(
    run: str,
    lie: str,
    peers: int | None,
    rate: float | None,
    liars: int | None,
    *,
    together: bool,
    undo: int | None = None,
) -> LieCase:
    """`lie` is KIND or KIND:STRENGTH. Raises `UserError`."""
    name, colon, told = lie.partition(":")
    kind = KINDS.get(name)
    if kind is None:
        raise UserError(f"there is no lie of the kind {name}", f"one of: {', '.join(KINDS)}")
    if kind.strength is None and colon:
        raise UserError(
            f"--lie {name} has no strength", f"leave it out; {', '.join(WITH_STRENGTH)} have one"
        )
    strength = _strength(name, told) if colon else kind.strength or 1.0
    fewest = PIPELINE_PEERS if kind.pipelines else PEERS
    count = peers or fewest
    if count < fewest:
        raise UserError(
            f"--lie {name} is played by at least {counted(fewest, 'daemon')}",
            f"play as many: --peers {fewest}",
        )
    lying = liars or count // 4
    if 2 * lying >= count:
        raise UserError(
            f"{lying} liars of {count} daemons are not fewer than half of them",
            f"play fewer (--liars {(count - 1) // 2}), or more daemons",
        )
    case = LieCase(run, name, strength, count, rate or kind.rate, lying, together, undo or 0)
    case.spec(read_run_spec(run))
    return case


def _strength(name: str, told: str) -> float:
    """Raises `UserError`."""
    with suppress(ValueError):
        if LEAST_STRENGTH <= (strength := float(told)) <= MOST_STRENGTH:
            return strength
    raise UserError(
        f"the strength of --lie {name}:{told} is none",
        f"give a number between {LEAST_STRENGTH:g} and {MOST_STRENGTH:g}, as in {name}:0.1",
    )


def play_lies(case: LieCase, keep: Path | None, console: Console) -> dict[str, Any]:
    with kept_directory(keep) as directory:
        spec = case.spec(run_to_play(case.run))
        bring_weights(case.run, spec, directory)
        verdict = play(directory, case, spec, lambda text: console.print(text, highlight=False))
        if left := processes_left(directory):
            verdict.violations.append(f"{counted(left, 'process')} left")
    promise, stays = case.promise, case.may_stay and not verdict.is_undone
    return {
        **asdict(case),
        "promise": promise.text,
        "spoils": promise.spoils or (STAYS if stays else ""),
        **asdict(verdict),
        "ok": not verdict.violations,
    }


def lies_summary(console: Console, report: dict[str, Any]) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    say(f"promised is that the liar is {report['promise']}")
    caught = report["caught_after"]
    for name, count in caught.items():
        found = "was never out" if count is None else f"was out in its lying step {count}"
        say(f"{name} {found}; {'barred' if name in report['barred'] else 'not barred'}")
    for name in report["had_no_work"]:
        say(f"{name} had no work to lie about")
    say(
        f"honest members barred: {len(report['false_bars'])}, called liars: "
        f"{len(report['wrongly_left_out'])}, in doubt: {len(report['doubted'])}, out for a while: "
        f"{len(report['honest_out'])}"
    )
    say(
        f"{counted(report['steps'], 'step')}; largest loss difference to an honest run "
        f"{difference_in_words(report)}"
    )
    if report["held_up_s"] is not None:
        say(
            f"cost: {counted(report['views'], 'view')}, at most {report['held_up_s']:.1f} s longer "
            f"than the usual {report['usual_step_s']:.1f} s without a commit; a liar came back "
            f"{report['came_back']} times"
        )
    if report["undo"]:
        found = "undone" if report["is_undone"] else "not undone, or not all of it"
        say(
            f"what it did: {found}; {counted(report['undone_steps'], 'step')} repeated, of "
            f"{report['undo_limit']} that a verdict may cost"
        )
    if report["fair_step_s"] is not None:
        say(
            f"the first ten steps took {report['first_steps_s']:.2f} s each, the last ten "
            f"{report['last_steps_s']:.2f} s; {report['fair_step_s']:.2f} s where all compute as "
            f"much; from step {report['fair_from']} on nearly so"
        )
    for violation in report["violations"]:
        console.print(f"violated: {violation}", style="red", highlight=False, markup=False)
    if not report["ok"]:
        console.print("[red]NOT ok[/red]")
    elif report["spoils"]:
        say(f"as promised, and nobody knows it: wrong are {report['spoils']}")
    elif report["not_compared"]:
        console.print("[yellow]as promised, as far as looked at[/yellow]; not losses")
    elif None in caught.values():
        say("as promised: nobody was found out, and the training is unharmed")
    else:
        console.print("[green]the lie did no harm[/green]")
