"""`p2p-dtfm dashboard`: the address of the dashboard, opened in a browser where there is one."""

import json
import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from p2p_dtfm.cli.app import HomeOption, JsonOption, app
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.local_client import call_daemon


@app.command()
def dashboard(
    open_browser: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Default: where this machine has a screen."),
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Open the dashboard of this machine's daemon; its address is printed too."""
    invitation = call_daemon(home, "dashboard")
    address = invitation["address_with_token"]
    if address is None:
        raise UserError(
            "the daemon runs without a dashboard",
            "start it again without --dashboard off",
            exit_code=4,
        )
    if as_json:
        typer.echo(json.dumps(invitation))
        return
    typer.echo(address)
    opens = open_browser if open_browser is not None else _has_screen()
    if opens and invitation["page"] is None:
        typer.echo("its disk took no page for the browser: open the address above", err=True)
    elif opens:
        webbrowser.open(Path(invitation["page"]).as_uri())
        # a browser from snap or flatpak cannot read the hidden directory in which it lies
        typer.echo("if the browser may not read that file, open the address above", err=True)
    else:
        port = address.split(":")[2].split("/")[0]
        typer.echo(
            f"from another machine: ssh -L {port}:127.0.0.1:{port} THIS-MACHINE, "
            "then open the same address there",
            err=True,
        )


def _has_screen() -> bool:
    on_terminal = sys.stdout.isatty()
    return on_terminal and bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
