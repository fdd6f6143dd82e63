"""`p2p-dtfm reproduce`: the paper's claims computed again, as a page and drawings."""

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from p2p_dtfm.cli.app import JsonOption, app
from p2p_dtfm.cli.terminal.output_files import write_text
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(help="Directory for the page and its drawings.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Take the rows that need minutes as they come along.")
    ] = False,
    rows: Annotated[
        Path | None,
        typer.Option(
            help="Steps that you have measured, in scenarios of your own: a TOML file, as "
            "docs/reproduce.md shows it. Each is simulated and set beside."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw what the DT-FM paper claims, what it published, and what we make of it."""
    from p2p_dtfm.sim.reproduction.collection import Collection, cached_rows
    from p2p_dtfm.sim.reproduction.page import drawings, page
    from p2p_dtfm.sim.reproduction.story import facts
    from p2p_dtfm.sim.reproduction.swarm.own_rows import read_own_rows

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the directory {out}: {error.strerror}", "choose another --out"
        ) from error
    began = time.monotonic()
    own = None if rows is None else (read_own_rows(rows), _read_run)
    results = Collection(out, quick, own).collect(_progress)
    drawn = drawings(results)
    kept = cached_rows()
    made = "Every row was computed here, in this directory."
    if quick:
        made = f"Cached rows were made by `{kept['command']}` on {kept['made']}."
    told = msgspec.to_builtins(results) | {"facts": facts(results), "made": made}
    write_text(out / "bars.json", json.dumps(told, indent=1) + "\n", "--out")
    write_text(out / "index.html", page(results, drawn, made), "--out")
    for name, text in drawn.items():
        write_text(out / name, text, "--out")
    if as_json:
        typer.echo(json.dumps(told))
        return
    typer.echo(told["facts"]["claim"])
    if rows is not None:
        typer.echo(_own_text(told["facts"]["own_rows_simulated_against_measured"]))
    typer.echo(
        f"{out / 'index.html'}, {len(drawn)} drawings and bars.json, "
        f"in {time.monotonic() - began:.0f} s"
    )


def _read_run(name: str, layers: int | None, global_batch: int | None) -> RunSpec:
    from p2p_dtfm.sim.scenario.files import read_run_spec
    from p2p_dtfm.train.model.kinds.registry import with_sizes  # torch, only for this

    return with_sizes(read_run_spec(name, layers, global_batch))


def _own_text(found: dict[str, float]) -> str:
    return (
        f"Your own {found['rows']:.0f} rows, simulated: median error {found['median']:.1%}, "
        f"worst {found['worst']:.1%}."
    )


def _progress(done: int, total: int, what: str) -> None:
    """Writes one line over and over on a terminal; elsewhere a line at every tenth of the way."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done} of {total}: {what}", end="", file=sys.stderr, flush=True)
        if done == total:
            print(file=sys.stderr)
    elif done % max(1, total // 10) == 0:
        print(f"{done} of {total}: {what}", file=sys.stderr, flush=True)
