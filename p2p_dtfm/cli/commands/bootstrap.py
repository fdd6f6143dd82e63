"""The command of a bootstrap node."""

import asyncio
from typing import Annotated

import typer

from p2p_dtfm.cli.app import HomeOption, JsonOption, app
from p2p_dtfm.cli.terminal.logs import set_up_logging


@app.command()
def bootstrap(
    listen: Annotated[
        list[str] | None, typer.Option(help="Multiaddress; default: TCP port 31331 everywhere.")
    ] = None,
    announce: Annotated[list[str] | None, typer.Option(help="Multiaddress to tell others.")] = None,
    initial_peers: Annotated[
        list[str] | None,
        typer.Option("--initial-peers", help="Another bootstrap node; may be repeated."),
    ] = None,
    relay: Annotated[bool, typer.Option(help="Pass bytes on between peers behind routers.")] = True,
    log: Annotated[str, typer.Option(help="Log format: auto, human or json.")] = "auto",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a node at which newcomers and members of any run meet. It trains nothing."""
    from p2p_dtfm.daemon.machine.home import default_home
    from p2p_dtfm.daemon.peers.bootstrap_node import DEFAULT_LISTEN, Bootstrap

    set_up_logging(log)
    node = Bootstrap(
        home or default_home() / "bootstrap",
        tuple(listen or (DEFAULT_LISTEN,)),
        tuple(announce or ()),
        tuple(initial_peers or ()),
        as_json,
        relay,
    )
    raise typer.Exit(asyncio.run(node.run()))
