"""`p2p-dtfm compare A B`: two runs' losses, by tokens and by time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from p2p_dtfm.cli.app import JsonOption, app
from p2p_dtfm.cli.terminal.output_files import check_writable, write_text
from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.facts.in_words import counted

if TYPE_CHECKING:
    from p2p_dtfm.core.protocol.run_spec import RunSpec
    from p2p_dtfm.web.comparison import RunCurves

HOME = "A daemon's home (its newest run), or the directory of a run in it."


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help=HOME)],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    html: Annotated[Path | None, typer.Option(help="Write the curves as a page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the losses of two runs at equal tokens and after equal times."""
    from p2p_dtfm.web import comparison

    check_writable(html, "--html")
    curves = (curves_of(first), curves_of(second))
    if html is not None:
        write_text(html, comparison.comparison_html(*curves), "--html")
    if as_json:
        typer.echo(json.dumps(msgspec.to_builtins(comparison.compare(*curves))))
        return
    table = Table("", *headings(curves))
    for row in comparison.comparison_rows(*curves):
        table.add_row(*map(Text, row))
    console = Console()
    console.print(table)
    for place, each in zip((first, second), curves, strict=True):
        if each.unreadable_lines > 1:  # the last one may be half written
            lines = counted(each.unreadable_lines, "line")
            typer.echo(f"{place}: {lines} of its history cannot be read", err=True)
    if html is not None:
        console.print(f"curves: {html}", markup=False, highlight=False, soft_wrap=True)


def headings(curves: "Sequence[RunCurves]") -> list[str]:
    """The runs' names; if these are alike, as after a change of one setting, also which it is."""
    names = [plain(each.name) for each in curves]
    if len(set(names)) < len(names):
        names = [
            f"{name} ({which})" for name, which in zip(names, ("first", "second"), strict=True)
        ]
    return [escape(name) for name in names]


def curves_of(place: Path) -> "RunCurves":
    """The curves of the run in this directory, or of this home's newest run. Raises `UserError`."""
    from p2p_dtfm.daemon.telemetry.event_log import FILE_NAME
    from p2p_dtfm.web.comparison import RunCurves, read_rows

    run = _run_directory(place, FILE_NAME)
    spec = _spec_in(run)
    try:
        parts = [run / FILE_NAME]
        if (older := (run / FILE_NAME).with_suffix(".old")).is_file():
            parts.insert(0, older)
        lines = [line for part in parts for line in part.read_bytes().splitlines()]
    except OSError as error:
        raise UserError(
            f"cannot read the history in {run}: {error.strerror}", "see that you may read it"
        ) from error
    rows, unreadable = read_rows(lines)
    if not rows:
        raise UserError(
            f"no step of the run in {run} is committed yet", "wait until it has done some"
        )
    return RunCurves(spec.name, spec.digest(), spec.tokens_per_step, rows, unreadable)


def _run_directory(place: Path, file_name: str) -> Path:
    if (place / file_name).is_file():
        return place
    found = list(place.glob(f"runs/*/{file_name}"))
    if not found:
        raise UserError(
            f"{place} has no history of a run",
            "name a daemon's home, or a directory under runs in it: p2p-dtfm compare HOME HOME",
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def _spec_in(run: Path) -> "RunSpec":
    """The run spec, read from any of the run's checkpoints, also from small or damaged ones."""
    from p2p_dtfm.train.model.checkpoint import read_manifest

    for path in sorted(run.glob("checkpoints/*/manifest.json"), reverse=True):
        try:
            return read_manifest(path.parent).spec()
        except (UserError, PeerFault):
            continue
    raise UserError(
        f"the run in {run} has no checkpoint that this version can read: it says how many "
        "tokens a step has",
        "wait for its first checkpoint; p2p-dtfm status says when it comes",
    )
