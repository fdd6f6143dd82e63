"""`p2p-dtfm verify TRANSCRIPT`: what a run says of itself, checked by somebody who was not
there."""

import contextlib
import json
import random
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from p2p_dtfm.cli.app import JsonOption, app
from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted

if TYPE_CHECKING:
    from p2p_dtfm.core.transcript.checking import Checker
    from p2p_dtfm.daemon.proof.sample_again import Judged, Work
    from p2p_dtfm.daemon.telemetry.names import Names

REFUSED = 1
UNJUDGED = 3
_WITH_AUDITS = "Whoever makes a run up can see to that; ask somebody whose machine can."
_BEHIND_GAPS = "What lies behind missing steps can be judged from the next checkpoint on alone."
_WITHOUT_AUDITS = "In a run without audits nobody can; --sample 0 checks signatures alone."
SAMPLE_FIX = "give a share such as 1% or 0.01, or 0 to check signatures only"


@app.command()
def verify(
    transcripts: Annotated[
        list[Path],
        typer.Argument(
            help="A transcript, or the home of a daemon that kept one; and others of the same run, "
            "for the steps that it lacks.",
            metavar="TRANSCRIPT...",
        ),
    ],
    sample: Annotated[
        str, typer.Option(help="The share of all stage-steps that is computed again, as 1%.")
    ] = "1%",
    seed: Annotated[
        int | None, typer.Option(help="Draw the same ones again; else nobody knows which.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Directory of the run's data; else beside the transcript.")
    ] = None,
    allow_gaps: Annotated[
        bool, typer.Option("--allow-gaps", help="End with 0 though steps are missing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a run's transcript: who agreed, who did how much, and whether it was done.

    Ends with 0 if all holds, with 1 if something in it is not so, with 2 if it cannot be read, and
    with 3 if works that were drawn could not be judged here, or steps are missing.
    """
    from p2p_dtfm.core.transcript.checking import NotTrue

    share = _share(sample)
    paths = [_found(place) for place in transcripts]
    seed = secrets.randbits(64) if seed is None else seed
    told: dict[str, Any] = {"transcript": str(paths[0]), "holds": True, "seed": seed}
    try:
        checker = _checked(paths, told)
        judged, works = _computed_again(checker, paths, data, share, seed, told)
    except NotTrue as found:
        told |= {"holds": False, "refused": found.reason, "step": found.step}
        told |= {"signed_by": found.peer_id}
        _tell_refusal(told, as_json, len(paths) > 1)
        raise typer.Exit(REFUSED) from None
    is_sure = share == 0 or (judged.works > 0 and not judged.unjudged)
    is_sure = is_sure and (allow_gaps or not judged.open) and str(paths[0]) not in told["elsewhere"]
    told["holds"] = True if is_sure else None
    if as_json:
        typer.echo(json.dumps(told))
    else:
        _tell(checker, judged, works, told)
    if not is_sure:
        raise typer.Exit(UNJUDGED)


def _share(text: str) -> float:
    """Raises `UserError`."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UserError(f"--sample {text} is no share of a whole", SAMPLE_FIX)
    return share


def _found(place: Path) -> Path:
    """Raises `UserError`."""
    from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME

    if place.is_file():
        return place
    if (place / FILE_NAME).is_file():
        return place / FILE_NAME
    found = list(place.glob(f"runs/*/{FILE_NAME}"))
    if not found:
        raise UserError(
            f"{place} is no transcript, and no home that has one",
            f"name a daemon's home, or {FILE_NAME} in the directory of a run under its runs",
        )
    return max(found, key=lambda path: path.stat().st_mtime)


def _checked(paths: list[Path], told: dict[str, Any]) -> "Checker":
    """Signatures, certificates, and the chain of steps. Raises `NotTrue` and `UserError`."""
    from p2p_dtfm.core.transcript.checking import NotTrue
    from p2p_dtfm.core.transcript.joining import differ_from, in_gaps, joined

    checkers = [_read(path, told) for path in paths]
    told["transcript"] = str(paths[0])
    specs = {checker.spec.digest() for checker in checkers if checker.spec is not None}
    if len(specs) > 1:
        raise UserError(
            "these transcripts are not all of one run",
            "name those of one run; of a home with several runs, the file in the run's directory",
        )
    checker, added = joined(checkers)
    spec, tallies = checker.spec, checker.tallies()
    assert spec is not None, "it was read"
    trained = [step for step in checker.steps.values() if step.outcome.loss is not None]
    due = len(trained) * spec.tokens_per_step * checker.layer_count
    if sum(tally.token_layers for tally in tallies.values()) != due:
        raise NotTrue("what its peers did does not add up to what the run is of")
    differ = {str(path): differ_from(checker, it) for path, it in zip(paths, checkers, strict=True)}
    left_out = {str(path): in_gaps(checker, it) for path, it in zip(paths, checkers, strict=True)}
    views = {*checker.views, *(step.view.id for step in checker.steps.values())}
    told |= {
        "run": spec.digest(),
        "name": spec.name,
        "views": len(views),
        "steps": len(trained),
        "of_steps": spec.total_steps,
        "tokens": len(trained) * spec.tokens_per_step,
        "missing": checker.gaps,
        "from_others": added,
        "left_out": {path: count for path, count in left_out.items() if count},
        "elsewhere": {path: step for path, step in differ.items() if step is not None},
        "repeated": checker.repeated,
        "tallies": msgspec.to_builtins(tallies),
    }
    return checker


def _read(path: Path, told: dict[str, Any]) -> "Checker":
    """Raises `NotTrue` and `UserError`."""
    from p2p_dtfm.core.transcript.checking import Checker
    from p2p_dtfm.daemon.proof.transcript_file import TranscriptLines
    from p2p_dtfm.net.contacts.identity import verify as is_signed

    told["transcript"] = str(path)
    lines, checker = TranscriptLines(path), Checker(is_signed)
    for entry in lines.entries():
        if lines.damaged and checker.spec is None:
            raise UserError(f"the first line of {path} is damaged", "copy it anew from its member")
        checker.take(entry)
    if checker.spec is None:
        raise UserError(
            f"{path} is no transcript: none of its lines is one",
            "name a file that a daemon has written: runs/*/transcript.txt in its home",
        )
    told["damaged_lines"] = told.get("damaged_lines", 0) + lines.damaged
    return checker


def _computed_again(
    checker: "Checker",
    paths: list[Path],
    data: Path | None,
    share: float,
    seed: int,
    told: dict[str, Any],
) -> "tuple[Judged, list[Work]]":
    """Compute drawn works again, and judge them. Raises `NotTrue` and `UserError`."""
    from p2p_dtfm.daemon.proof.from_disk import sample_of
    from p2p_dtfm.daemon.proof.sample_again import Judged, drawn, works_of

    works = works_of(checker)
    chosen = drawn(works, share, random.Random(seed).randrange)
    gaps = checker.gaps
    judged = Judged(open=dict.fromkeys(gaps, "nothing was computed again"))
    if chosen and checker.spec is not None:
        told["drawn"] = chosen
        run, *others = (path.parent for path in paths)
        with _progress() as tell:
            sample = sample_of(checker.spec, checker.steps, run, data, tell, others)
            judged = sample.judge(chosen, gaps)
            sample.look_at_checkpoints()
    told |= {
        "computed_though_missing": sorted(judged.bridged),
        "not_shown": [{"first": a, "end": b, "why": why} for (a, b), why in judged.open.items()],
        "signed_checkpoints": judged.signed_checkpoints,
        "stage_steps": len(works),
        "judged": judged.works,
        "steps_computed": judged.steps,
        "unjudged": judged.unjudged,
        "passed_over": judged.passed_over,
    }
    return judged, chosen


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows one line on a terminal that changes, and removes it before anything else is printed."""
    if not sys.stderr.isatty():
        yield lambda step, last: None
        return
    try:
        yield lambda step, last: print(f"\rcomputes step {step} ...", end="", file=sys.stderr)
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _tell_refusal(told: dict[str, Any], as_json: bool, is_one_of_several: bool = False) -> None:
    if as_json:
        typer.echo(json.dumps(told))
        return
    where = "" if told["step"] is None else f"step {told['step']}: "
    if is_one_of_several and "run" not in told:  # after that, facts of all together
        where = f"{told['transcript']}: {where}"
    typer.echo(f"REFUSED: {plain(where)}{plain(told['refused'])}")
    if told["signed_by"]:
        typer.echo(f"It stands under the signature of {plain(told['signed_by'])}.")
    for line in _of_seed(told):
        typer.echo(line)


def _of_seed(told: dict[str, Any]) -> list[str]:
    """How to have the same works judged again, which others may want who read what came out."""
    if "drawn" not in told:
        return []
    again = f"--seed {told['seed']} with the same transcripts and --sample"
    return [f"What was judged can be drawn again: {again}."]


def _names(checker: "Checker") -> "Names":
    """The names that members gave themselves."""
    from p2p_dtfm.daemon.telemetry.names import Names

    names = Names()
    for view in {step.view.id: step.view for step in checker.steps.values()}.values():
        names.learn(view.snapshot.records)
    return names


def _tell(checker: "Checker", judged: "Judged", chosen: "list[Work]", told: dict[str, Any]) -> None:
    console = Console()
    spec, steps = checker.spec, told["steps"]
    assert spec is not None, "it was checked"
    views = counted(told["views"], "view")
    typer.echo(
        f"{spec.name} ({spec.digest()}): {counted(steps, 'step')} of {spec.total_steps:,}, "
        f"{counted(told['tokens'], 'token')}, {views}; "
        "every view and every step is signed by all who made it."
    )
    if told["from_others"]:
        added = counted(told["from_others"], "step")
        typer.echo(f"{added} of these came from the other transcripts, and lead to its own.")
    if told["damaged_lines"]:
        typer.echo(f"{counted(told['damaged_lines'], 'line')} could not be read.")
    if spec.admission.is_invited:
        typer.echo(
            "This run is by invitation: its transcript holds the key to where its members are, and "
            "their addresses and devices. Give it to nobody who might not have been invited."
        )
    names = _names(checker)
    table = Table("peer", "id ends with", "steps", "of the tokens", "audits", "guarded")
    total = sum(tally["token_layers"] for tally in told["tallies"].values()) or 1
    for peer, tally in told["tallies"].items():
        part = f"{100 * tally['token_layers'] / total:.1f}%"
        row = (names.of(peer), peer[-6:], f"{tally['stage_steps']:,}", part, str(tally["audits"]))
        table.add_row(*map(Text, (*row, f"{tally['guarded_layers']:,}")))
    console.print(table)
    for line in _of_checkpoints(judged):
        typer.echo(plain(names.in_text(line)))
    for reason, count in judged.unjudged.items():
        counts = counted(count, "stage-step")
        typer.echo(f"{counts} could not be judged here: {plain(names.in_text(reason))}.")
    unjudged = sum(judged.unjudged.values())
    if judged.works:
        drawn = counted(len(chosen) - unjudged, "stage-step")
        typer.echo(
            f"Computed again: {drawn} of {told['stage_steps']:,} drawn, and what lay on the way, "
            f"{judged.works:,} in all: each is what was signed, bit for bit."
        )
    elif not unjudged:
        typer.echo("Nothing was computed again: that all is signed does not show that it was done.")
    if unjudged:
        advice = _WITH_AUDITS if unjudged > judged.behind_gaps else _BEHIND_GAPS
        typer.echo(
            f"NOT SHOWN: of {counted(len(chosen), 'stage-step')} drawn, {unjudged:,} could not be "
            f"judged. {_WITHOUT_AUDITS if not spec.audit.rate else advice}"
        )
    for line in (*_of_seed(told), *_of_gaps(judged, told), *_of_others(told)):
        typer.echo(plain(names.in_text(line)))


def _of_checkpoints(judged: "Judged") -> list[str]:
    lines = [f"Passed over: {reason}." for reason in judged.passed_over]
    if judged.signed_checkpoints:
        steps = ", ".join(map(str, judged.signed_checkpoints))
        lines.append(f"Checkpoints beside it that hold what was signed: of step {steps}.")
    return lines


def _of_gaps(judged: "Judged", told: dict[str, Any]) -> list[str]:
    """How many steps, from the first to the last in the transcript, are shown, and why not more."""
    missing = sum(end - first for first, end in told["missing"])
    if not missing:
        return []
    lines = []
    if judged.bridged:
        steps = ", ".join(map(str, sorted(judged.bridged)))
        lines.append(
            f"Missing, but computed as the step before it, which led to what follows: {steps}."
        )
    for (first, end), why in judged.open.items():
        which = f"step {first} is" if end == first + 1 else f"steps {first} to {end - 1} are"
        lines.append(f"NOT SHOWN: {which} missing ({why}). {_broken(first, end)}")
    if judged.open:
        unshown = sum(end - first for first, end in judged.open)
        lines.append(
            f"So {counted(unshown, 'step')} of {told['steps'] + missing:,} are not shown. Another "
            "member's transcript may have them: name it after this one."
        )
        if not judged.unjudged:
            lines[-1] += " With --allow-gaps what is here is enough."
    return lines


def _of_others(told: dict[str, Any]) -> list[str]:
    """What was named on the command line and does not belong to what was judged."""
    lines = [
        f"{path} has {count:,} of the missing steps. They were left out: nothing shows that they "
        "led to what follows, as long as others are missing between."
        for path, count in told["left_out"].items()
    ]
    for path, step in told["elsewhere"].items():
        said = "NOT SHOWN: " if path == told["transcript"] else ""
        lines.append(
            f"{said}{path} goes another way from step {step} on than the transcript that has come "
            "furthest, which was judged: of that nothing is said here. Whoever was killed or away "
            "may have such steps. To have it judged, name it alone."
        )
    return lines


def _broken(first: int, end: int) -> str:
    if not first:
        return f"With which states step {end} begins is its members' word."
    return f"Nothing shows that the steps before have led to step {end}."
