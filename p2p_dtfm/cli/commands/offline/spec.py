"""`p2p-dtfm spec`: a run spec that comes along, as a file to change."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.terminal.output_files import check_writable, write_text
from p2p_dtfm.core.protocol.errors import UserError


@app.command()
def spec(
    name: Annotated[str, typer.Argument(help="Of a run spec that comes along, such as tiny.")],
    out: Annotated[Path | None, typer.Option(help="Write it into this new file.")] = None,
) -> None:
    """Print a run spec that comes along, with its remarks: a copy to change for a run of your
    own."""
    from p2p_dtfm.sim.scenario.files import find_run_spec

    path = find_run_spec(name)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read the run spec {path}: {error}", "write it in UTF-8") from error
    if out is None:
        typer.echo(text, nl=False)
        return
    check_writable(out, "--out")
    if out.exists():
        raise UserError(f"--out {out} is there already", "choose another name, or remove it")
    write_text(out, text, "--out")
    typer.echo(f"{out}: change it, then found the run with p2p-dtfm --run {shlex.quote(str(out))}")
