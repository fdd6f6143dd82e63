"""The command that says why joining would fail."""

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from p2p_dtfm.cli.app import HomeOption, JsonOption, app
from p2p_dtfm.cli.terminal.logs import set_up_logging
from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.core.protocol.errors import UserError

FOUND_CHARACTERS = 4096
"""The longest text of a finding, part of which other peers say."""
_MARKS = {
    "ok": "[green]ok     [/green]",
    "warning": "[yellow]warning[/yellow]",
    "failed": "[red]failed [/red]",
    "skipped": "[dim]skipped[/dim]",
}


@app.command()
def doctor(
    initial_peers: Annotated[
        list[str] | None,
        typer.Option("--initial-peers", help="Look at the way to this peer; may be repeated."),
    ] = None,
    invite: Annotated[
        str | None,
        typer.Option("--invite", help="Look at the ways that this line of p2p-dtfm invite names."),
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Run spec to time the device with.")
    ] = None,
    run_digest: Annotated[
        str | None, typer.Option(help="Say what this machine would add to this run.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda or cuda:N; all, or a list with commas.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="As for the daemon.")] = None,
    memory_gib: Annotated[float | None, typer.Option(help="As for the daemon.")] = None,
    resident_gib: Annotated[float | None, typer.Option(help="As for the daemon.")] = None,
    uplink_mbps: Annotated[float | None, typer.Option(help="As for the daemon.")] = None,
    downlink_mbps: Annotated[float | None, typer.Option(help="As for the daemon.")] = None,
    listen: Annotated[list[str] | None, typer.Option(help="As for the daemon.")] = None,
    announce: Annotated[list[str] | None, typer.Option(help="As for the daemon.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="The daemon's settings from a TOML file.")
    ] = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find what would keep this machine from taking part, and say what to do about it."""
    from p2p_dtfm.daemon.machine.settings import resolve
    from p2p_dtfm.daemon.peers.checks.check import Check, Grade
    from p2p_dtfm.ports.packages import not_loaded
    from p2p_dtfm.sim.scenario.files import read_run_spec

    try:
        from p2p_dtfm.daemon.peers.doctor import Examination, examine, exit_code
        from p2p_dtfm.daemon.peers.facts.newcomer import within_limits
        from p2p_dtfm.daemon.peers.guests.pasted_line import (
            addresses_of,
            invitation_of,
            run_digest_of,
        )
        from p2p_dtfm.net import event_loop
        from p2p_dtfm.train.model.kinds.registry import with_sizes
    except (ImportError, OSError) as error:  # this command is there to find such errors
        raise not_loaded(error) from error

    set_up_logging("json" if as_json else "auto")
    settings = resolve(
        config,
        {
            "home": home,
            "initial_peers": tuple(initial_peers or ()),
            "invite": invite,
            "run": run,
            "run_digest": run_digest,
            "device": device,
            "threads": threads,
            "memory_gib": memory_gib,
            "resident_gib": resident_gib,
            "uplink_mbps": uplink_mbps,
            "downlink_mbps": downlink_mbps,
            "listen": tuple(listen or ()),
            "announce": tuple(announce or ()),
        },
    ).settings
    if run_digest and not (settings.initial_peers or settings.invite):
        raise UserError(
            "--run-digest goes with --initial-peers",
            "name a peer through which that run is found: --initial-peers ADDRESS",
        )
    what = Examination(
        home=settings.home,
        listen=settings.listen,
        announce=settings.announce,
        initial_peers=addresses_of(settings),
        device=settings.device,
        threads=settings.compute_threads,
        spec=with_sizes(read_run_spec(settings.run or "tiny")),
        memory_limit_bytes=settings.memory_limit_bytes,
        takes_lines=settings.direct_lines,
        newcomer=partial(within_limits, settings),
        run_digest=run_digest_of(settings),
        invitation=invitation_of(settings),
    )
    console = Console()

    def tell(check: Check) -> None:
        if as_json:
            return
        console.print(
            f"{_MARKS[check.verdict]} [bold]{check.name:<13}[/bold]", end="", soft_wrap=True
        )
        console.print(
            plain(check.found, FOUND_CHARACTERS), markup=False, highlight=False, soft_wrap=True
        )
        if check.fix and check.verdict is not Grade.OK:
            console.print(
                f"{'':<21}fix: {plain(check.fix, FOUND_CHARACTERS)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    checks = event_loop.run(examine(what, tell))
    code = exit_code(checks)
    if as_json:
        typer.echo(json.dumps({"ok": code == 0, "checks": [check.as_json() for check in checks]}))
    raise typer.Exit(code)
