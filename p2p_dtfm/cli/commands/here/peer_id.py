"""`p2p-dtfm id`: by which name swarms know this machine, before it takes part in any."""

import json

import typer

from p2p_dtfm.cli.app import HomeOption, JsonOption, app
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.home import Home, default_home
from p2p_dtfm.net.contacts.identity import Identity


@app.command("id")
def peer_id(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Print the peer id of this home, which stays the same for good; a new home gets one."""
    place = Home(home or default_home())
    try:
        place.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        cause = f"cannot use {place.root}: {error.strerror}"
        raise UserError(cause, "choose another --home") from error
    found = Identity.load_or_create(place.identity).peer_id
    typer.echo(json.dumps({"peer_id": found}) if as_json else found)
