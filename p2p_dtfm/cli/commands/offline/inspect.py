"""`p2p-dtfm inspect FILE`: a file of p2p-dtfm's in words."""

import json
from pathlib import Path
from typing import Annotated

import typer

from p2p_dtfm.cli.app import JsonOption, app
from p2p_dtfm.cli.terminal.plain import harmless_lines


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="Record, snapshot, plan, checkpoint or frames.")],
    as_json: JsonOption = False,
) -> None:
    """Print what a record, snapshot, plan, checkpoint or captured frame says."""
    from p2p_dtfm.cli.commands.offline.inspected_file import inspected

    found = inspected(file)
    if as_json:
        typer.echo(json.dumps({"kind": found.kind, "values": found.values}, default=bytes.hex))
        return
    typer.echo(harmless_lines("\n".join(found.words)))
