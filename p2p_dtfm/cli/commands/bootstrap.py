"""The command of a bootstrap node."""

from typing import Annotated, Literal

import typer

from p2p_dtfm.cli.app import HomeOption, JsonOption, app
from p2p_dtfm.cli.terminal.logs import set_up_logging
from p2p_dtfm.core.protocol.errors import UserError


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
    public_status: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of a page about a run, for anybody; 0: none."),
    ] = 0,
    run_digest: Annotated[str, typer.Option(help="The run that this page is of.")] = "",
    log: Annotated[Literal["auto", "human", "json"], typer.Option(help="Log format.")] = "auto",
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a node at which newcomers and members of any run meet. It trains nothing."""
    from p2p_dtfm.daemon.machine.home import default_home
    from p2p_dtfm.daemon.peers.bootstrap_node import DEFAULT_LISTEN, Bootstrap, public_page
    from p2p_dtfm.net import event_loop

    if run_digest and not public_status:
        raise UserError(
            "--run-digest goes with --public-status",
            "leave it out: a node serves the members of any run; a page is of one",
        )
    set_up_logging(log)
    node = Bootstrap(
        home or default_home() / "bootstrap",
        tuple(listen or (DEFAULT_LISTEN,)),
        tuple(announce or ()),
        tuple(initial_peers or ()),
        as_json,
        relay,
        public_page(public_status, run_digest),
    )
    raise typer.Exit(event_loop.run(node.run()))
