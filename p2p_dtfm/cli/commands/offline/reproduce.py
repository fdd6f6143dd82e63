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


@app.command()
def reproduce(
    out: Annotated[Path, typer.Option(help="Directory for the page and its drawings.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Take the rows that need minutes as they come along.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Draw what the DT-FM paper claims, what it published, and what we make of it."""
    from p2p_dtfm.sim.reproduction.collection import Collection, cached_rows
    from p2p_dtfm.sim.reproduction.page import drawings, page
    from p2p_dtfm.sim.reproduction.story import facts

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the directory {out}: {error.strerror}", "choose another --out"
        ) from error
    began = time.monotonic()
    results = Collection(out, quick).collect(_progress)
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
    typer.echo(
        f"{out / 'index.html'}, {len(drawn)} drawings and bars.json, "
        f"in {time.monotonic() - began:.0f} s"
    )


def _progress(done: int, total: int, what: str) -> None:
    """A line that is written over on a terminal; elsewhere every tenth of the way."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{done} of {total}: {what}", end="", file=sys.stderr, flush=True)
        if done == total:
            print(file=sys.stderr)
    elif done % max(1, total // 10) == 0:
        print(f"{done} of {total}: {what}", file=sys.stderr, flush=True)
