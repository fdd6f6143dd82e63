"""What can be typed. A command is imported when it is typed, and imports what it needs when it
runs. So `status` on a slow machine does not wait for the libraries of `simulate`."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from p2p_dtfm.cli.terminal.mistyped import Commands
from p2p_dtfm.ports.ctrl_c import ends_at_once

MODULES = {
    "bootstrap": "bootstrap",
    "chaos": "chaos",
    "dashboard": "dashboard",
    "prepare": "data",
    "generate": "data",
    "demo": "demo",
    "doctor": "doctor",
    "invite": "invite",
    "revoke": "invite",
    "export": "models",
    "import": "models",
    "status": "swarm",
    "peers": "swarm",
    "leave": "swarm",
    "pause": "swarm",
    "resume": "swarm",
    "plan": "plan",
    "trace": "trace",
    "id": "here.peer_id",
    "compare": "offline.compare",
    "inspect": "offline.inspect",
    "reproduce": "offline.reproduce",
    "spec": "offline.spec",
    "verify": "offline.verify",
    "simulate": "simulate",
    "service": "here.service",
}
"""All commands, in the order of help, and the module of `cli.commands` that registers each."""


class Program(Commands):
    """Imports the module of a command when the command is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in MODULES and cmd_name not in self.commands:
            with ends_at_once():
                importlib.import_module(f"p2p_dtfm.cli.commands.{MODULES[cmd_name]}")
            group: Any = typer.main.get_command(app)
            self.commands.update(group.commands)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    cls=Program,
    name="p2p-dtfm",
    help="Ordinary computers train one GPT together, peer to peer, with no leader.",
    invoke_without_command=True,
    no_args_is_help=False,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="The daemon's directory.", envvar="P2P_DTFM_HOME")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
LayersOption = Annotated[int | None, typer.Option(help="Blocks, instead of the run spec's.")]
GlobalBatchOption = Annotated[
    int | None, typer.Option(help="Sequences in a step, instead of the run spec's.")
]


@app.callback()
def run(
    context: typer.Context,
    initial_peers: Annotated[
        list[str] | None,
        typer.Option("--initial-peers", help="Join the swarm of this address; may be repeated."),
    ] = None,
    invite: Annotated[
        str | None, typer.Option("--invite", help="Join with this line of p2p-dtfm invite.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--run", help="Found a swarm with this run spec (file or name).")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What others see this peer called.")
    ] = None,
    new: Annotated[
        bool | None,
        typer.Option("--new", help="With --run: found afresh, whatever became of it before."),
    ] = None,
    apart: Annotated[
        bool | None,
        typer.Option("--apart", help="Go on although members of another version are there."),
    ] = None,
    nearby: Annotated[
        bool | None,
        typer.Option(
            "--nearby/--no-nearby", help="Whether to look for members on the local network."
        ),
    ] = None,
    run_digest: Annotated[
        str | None, typer.Option("--run-digest", help="Join only the run of this digest.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda or cuda:N; all, or a list: a daemon for each."),
    ] = None,
    shape: Annotated[
        Path | None, typer.Option(help="Shaped links, from a launcher's file.", hidden=True)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads to compute with; 0: half of the cores.")
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(help="Memory to use, in GiB; 0: nearly all that is free (a card: 4/5)."),
    ] = None,
    resident_gib: Annotated[
        float | None, typer.Option(help="Most memory of the whole process, in GiB; 0: no limit.")
    ] = None,
    uplink_mbps: Annotated[
        float | None, typer.Option(help="Most to send, in Mbit/s; 0: no limit.")
    ] = None,
    downlink_mbps: Annotated[
        float | None, typer.Option(help="Most to receive, in Mbit/s; 0: no limit.")
    ] = None,
    disk_gib: Annotated[
        float | None, typer.Option(help="Most disk for checkpoints and data, in GiB; 0: no limit.")
    ] = None,
    hours: Annotated[
        str | None, typer.Option(help="Take part in these hours only, such as 22-07.")
    ] = None,
    on_battery: Annotated[
        bool | None, typer.Option("--on-battery", help="Take part on battery, too.")
    ] = None,
    on_metered: Annotated[
        bool | None, typer.Option("--on-metered", help="Take part over a metered line, too.")
    ] = None,
    busy_percent: Annotated[
        int | None,
        typer.Option(help="Pause while others use more than this of the computer; 0: never."),
    ] = None,
    webhook: Annotated[
        str | None, typer.Option(help="An http address that is told of problems and of the end.")
    ] = None,
    notify: Annotated[
        bool | None,
        typer.Option("--notify/--no-notify", help="Whether the desktop is told of the same."),
    ] = None,
    listen: Annotated[list[str] | None, typer.Option(help="Multiaddress to listen on.")] = None,
    announce: Annotated[list[str] | None, typer.Option(help="Multiaddress to tell others.")] = None,
    network: Annotated[
        str | None, typer.Option(help="How far the others are: auto, lan or wan.")
    ] = None,
    relay: Annotated[
        bool | None,
        typer.Option(
            "--relay/--no-relay", help="Whether to pass bytes on between peers behind routers."
        ),
    ] = None,
    direct_lines: Annotated[
        bool | None,
        typer.Option(
            "--direct-lines/--no-direct-lines",
            help="Whether tensors may take connections of their own beside libp2p's.",
        ),
    ] = None,
    port_mapping: Annotated[
        bool | None,
        typer.Option(
            "--port-mapping/--no-port-mapping",
            help="Whether the router is asked to forward the port that is listened on.",
        ),
    ] = None,
    publish: Annotated[
        bool | None,
        typer.Option(
            "--publish/--no-publish",
            help="Whether anybody may read this peer's device, links and layers in the directory.",
        ),
    ] = None,
    expect_peers: Annotated[
        int | None, typer.Option(help="A founder waits for this many peers before it starts.")
    ] = None,
    expect_wait_s: Annotated[
        float | None, typer.Option(help="How long it waits for them, in seconds.")
    ] = None,
    exit_when_done: Annotated[
        bool | None, typer.Option("--exit-when-done", help="End when the run is complete.")
    ] = None,
    until_stdin_closes: Annotated[
        bool | None, typer.Option("--until-stdin-closes", help="Leave when standard input closes.")
    ] = None,
    dashboard: Annotated[
        str | None, typer.Option(help="Dashboard's port on loopback, auto or off.")
    ] = None,
    public_status: Annotated[
        int | None,
        typer.Option(help="Port of a page about the run that anybody may read; 0: none."),
    ] = None,
    tell_status: Annotated[
        bool | None,
        typer.Option(
            "--tell-status/--no-tell-status",
            help="Tell bootstrap nodes what such a page shows, so that they can serve it.",
        ),
    ] = None,
    tensorboard: Annotated[
        str | None,
        typer.Option(metavar="<path>", help="Write figures for TensorBoard into this directory."),
    ] = None,
    samples: Annotated[
        bool | None,
        typer.Option("--samples/--no-samples", help="Whether the model writes text as it learns."),
    ] = None,
    transcript_mib: Annotated[
        int | None, typer.Option(help="Most MiB of the run's transcript; 0: none is kept.")
    ] = None,
    ids: Annotated[
        bool | None,
        typer.Option("--ids/--no-ids", help="Peers in the log by their ids, not their names."),
    ] = None,
    log: Annotated[str | None, typer.Option(help="Log format: auto, human or json.")] = None,
    home: Annotated[
        str | None, typer.Option(metavar="<path>", help="The daemon's directory.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings from a TOML file.")
    ] = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print every setting and its origin, and end.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Without a command: the daemon. It takes up the last run of its home, joins a swarm with
    --initial-peers, or founds one with --run."""
    if context.invoked_subcommand is not None:
        _refuse_options_before_a_command(context)
        return
    if version:
        from p2p_dtfm import __version__

        typer.echo(__version__)
        return
    from p2p_dtfm.daemon.machine.settings import Settings, resolve

    flags = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in context.params.items()
        if name in Settings.model_fields
    }
    resolved = resolve(config, flags)
    if show_config:
        typer.echo(resolved.describe())
        return
    from p2p_dtfm.cli.commands.run import run_daemon

    raise typer.Exit(run_daemon(resolved.settings))


def _refuse_options_before_a_command(context: typer.Context) -> None:
    """Options before a command are the daemon's, and would be lost silently. Raises `UserError`."""
    given = [
        option.opts[0]
        for option in context.command.params
        if option.name is not None
        and getattr(context.get_parameter_source(option.name), "name", "") == "COMMANDLINE"
    ]
    if given:
        from p2p_dtfm.core.protocol.errors import UserError

        verb = context.invoked_subcommand or ""
        raise UserError(
            f"{given[0]} stands before {verb}, where it would be the daemon's and be lost",
            _place_of(context, verb, given[0]),
        )


def _options_of(command: Any) -> list[str]:
    return [name for it in command.params for name in it.opts]


def _place_of(context: typer.Context, verb: str, option: str) -> str:
    group: Any = context.command
    command = group.get_command(context, verb)
    for name, each in getattr(command, "commands", {}).items():  # the commands of `service`
        if option in _options_of(each):
            verb, command = f"{verb} {name}", each
            break
    known = _options_of(command)
    more = f"p2p-dtfm {verb} --help lists what it knows"
    if option in known:
        return f"write it behind: p2p-dtfm {verb} {option} ... ({more})"
    return f"leave it out: {verb} has no {option} ({more})"
