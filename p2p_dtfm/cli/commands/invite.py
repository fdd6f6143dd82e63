"""Inviting others, and taking invitations back."""

import json
from typing import Annotated
from urllib.parse import urlencode

import typer
from rich.console import Console

from p2p_dtfm.cli.app import HomeOption, JsonOption, app
from p2p_dtfm.cli.terminal.durations import seconds_of
from p2p_dtfm.core.protocol.facts.in_words import duration
from p2p_dtfm.daemon.machine.local_client import call_daemon


@app.command()
def invite(
    home: HomeOption = None,
    expires: Annotated[
        str, typer.Option("--expires", help="How long others can join with it: 2h, 7d.")
    ] = "7d",
    may_invite: Annotated[
        bool, typer.Option("--may-invite", help="Who joins with it may invite others.")
    ] = False,
    qr: Annotated[bool, typer.Option("--qr", help="Show it as a QR code, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print one line with which others join; it works while any one of several members lives."""
    seconds = seconds_of(expires, "--expires")
    asked = urlencode({"seconds": seconds, "may_invite": int(may_invite)})
    made = call_daemon(home, f"invite?{asked}", "POST")
    if as_json:
        typer.echo(json.dumps(made))
        return
    typer.echo(f"p2p-dtfm --invite {made['line']}")
    if qr:
        from p2p_dtfm.web.qr import qr_in_terminal

        qr_in_terminal(f"p2p-dtfm --invite {made['line']}")
    say = Console(stderr=True, highlight=False, soft_wrap=True).print
    if made.get("is_complete"):
        say("all steps of the run are done: nobody can join it any more, by this line or another")
        return
    if made.get("is_near"):
        say(
            "only machines of your own network can call the addresses in it: for others, forward a "
            "port of your router and start with --announce /ip4/YOUR-PUBLIC-ADDRESS/tcp/PORT"
        )
    if made["name"] is None:
        say("anybody may join this run: the line only says where it is")
        return
    rights = " and invite others" if made["may_invite"] else ""
    say(f"whoever has this line can join{rights}, for {duration(made['lasts_s'])}")
    if made["is_shorter"]:
        say("that is shorter than asked: then the line ends by which this peer came itself")
    say(f"to take it back: p2p-dtfm revoke {made['name']}")


@app.command()
def revoke(
    who: Annotated[str, typer.Argument(help="A member's name or id, or an invitation.")],
    home: HomeOption = None,
) -> None:
    """Take an invitation back: a member goes with the next view; with a line, all who came by it
    go."""
    done = call_daemon(home, f"revoke?{urlencode({'who': who}, errors='replace')}", "POST")
    if done.get("stays"):
        typer.echo(
            f"the invitation of {done['revoked']} is taken back, and it stays: it has come by "
            "somebody else's, too; the founder can send it away"
        )
        return
    typer.echo(f"{done['revoked']} is revoked; the other members are told")
