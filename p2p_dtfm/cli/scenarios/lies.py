"""`p2p-dtfm chaos --lie KIND`: a quarter of a swarm with audits lies, and the others are judged."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.lies.kinds import KINDS, WITH_STRENGTH
from p2p_dtfm.testbed.lies.played import LieCase, play
from p2p_dtfm.testbed.swarm_directory import kept_directory, processes_left

PEERS = 4


def lie_case(
    run: str, kind: str, strength: float | None, peers: int, rate: float | None
) -> LieCase:
    """Raises `UserError`."""
    if kind not in KINDS:
        raise UserError(f"there is no lie of the kind {kind}", f"one of: {', '.join(KINDS)}")
    if peers < PEERS:
        raise UserError(
            f"a quarter of {peers} daemons is none", f"play {PEERS} or more: --peers {PEERS}"
        )
    if strength is not None and kind not in WITH_STRENGTH:
        raise UserError(
            f"--lie {kind} has no strength", f"leave it out; {', '.join(WITH_STRENGTH)} have one"
        )
    case = LieCase(run, kind, strength or 1.0, peers, rate or 1.0)
    case.spec(read_run_spec(run))
    return case


def play_lies(case: LieCase, keep: Path | None, console: Console) -> dict[str, Any]:
    with kept_directory(keep) as directory:
        spec = case.spec(read_run_spec(case.run))
        verdict = play(directory, case, spec, lambda text: console.print(text, highlight=False))
        if left := processes_left(directory):
            verdict.violations.append(f"{counted(left, 'process')} left")
    return {**asdict(case), **asdict(verdict), "ok": not verdict.violations}


def lies_summary(console: Console, report: dict[str, Any]) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for name, count in report["caught_after"].items():
        found = "was never caught" if count is None else f"was caught in its lying step {count}"
        say(f"{name} {found}; {'barred' if name in report['barred'] else 'not barred'}")
    say(
        f"honest members barred: {len(report['false_bars'])}, called liars: "
        f"{len(report['wrongly_left_out'])}, in doubt: {len(report['doubted'])}"
    )
    difference = report["max_loss_difference"]
    say(
        f"{counted(report['steps'], 'step')}; largest loss difference to an honest run "
        + ("not compared" if difference is None else f"{difference:.1e}")
    )
    for violation in report["violations"]:
        console.print(f"violated: {violation}", style="red", highlight=False, markup=False)
    console.print("[green]the lie did no harm[/green]" if report["ok"] else "[red]NOT ok[/red]")
