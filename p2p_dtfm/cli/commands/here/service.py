"""`p2p-dtfm service`: the daemon as a service of this user, with what its owner allows."""

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2p_dtfm.cli.app import app, run
from p2p_dtfm.cli.commands.here.installed import UNIT, places
from p2p_dtfm.cli.terminal.mistyped import refuse_what_is_no_value
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.home import USUAL_HOME, Home, expanded, home_option
from p2p_dtfm.daemon.machine.life import FOR_ITS_OWNER
from p2p_dtfm.daemon.machine.local_client import holder_of

if TYPE_CHECKING:
    from p2p_dtfm.daemon.machine.settings import Settings

SYSTEMCTL_S = 60.0
LEAVES_S = 900
"""Seconds that the daemon has to hand its layers over (2 GB at 20 Mbit/s) before systemd kills
it."""
NOT_OF_A_SERVICE = {
    *("run", "new", "expect_peers", "expect_wait_s"),
    *("exit_when_done", "until_stdin_closes", "ids", "log", "shape"),
    *("context", "config", "show_config", "version"),
}
"""Options of the daemon that a service does not have: those for founding a run, those for looking
on, and those that are no settings."""
DIRECTORIES = {"home", "tensorboard"}
"""Settings that are made absolute: systemd starts the daemon in another directory than this one,
and without this environment."""
WHEREVER_IT_IS = {"home"}
"""Always written down: the usual home depends on XDG_DATA_HOME, which systemd may not have."""
service = typer.Typer(help="The daemon as a service of this user, in the background.")
app.add_typer(service, name="service")


def unit_text(program: str, settings_file: Path, resident_gib: float) -> str:
    """The unit that systemd reads. Paths are quoted as systemd wants it."""
    memory = f"MemoryMax={int(resident_gib * 1024)}M\n" if resident_gib else ""
    command = f"{_quoted(program)} --config {_quoted(str(settings_file))} --log json"
    return (
        "# Made by p2p-dtfm service install; p2p-dtfm service uninstall removes it.\n"
        "[Unit]\n"
        "Description=p2p-dtfm: trains a model together with others\n"
        "StartLimitIntervalSec=0\n\n"
        "[Service]\n"
        "Type=exec\n"
        f"ExecStart={command}\n"
        "# what its owner must see to is not tried again for ever\n"
        "Restart=on-failure\nRestartSec=30\n"
        f"RestartPreventExitStatus={' '.join(map(str, FOR_ITS_OWNER))}\n"
        "# it hands its layers over before it ends; p2pd ends with it\n"
        f"KillMode=mixed\nTimeoutStopSec={LEAVES_S}\n"
        "Nice=10\nIOSchedulingClass=idle\nNoNewPrivileges=yes\nUMask=0077\n"
        f"{memory}\n"
        "[Install]\n"
        "WantedBy=default.target\n"
    )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def settings_text(values: dict[str, Any]) -> str:
    """The settings as a file for `--config`. JSON's strings, numbers and lists of strings are
    TOML's as well, except for characters that JSON writes as two halves."""
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in values.items()]
    lines = ["# Settings of the service; p2p-dtfm --show-config lists all.", *lines, ""]
    return "\n".join(lines).replace("\x7f", "\\u007f")


def _with_options_of_the_daemon(install: Callable[..., None]) -> Callable[..., None]:
    """Gives `install` every option of the daemon, but those that no service has."""
    own = inspect.signature(install).parameters["print_only"]
    options = [
        each.replace(kind=each.KEYWORD_ONLY)
        for each in inspect.signature(run).parameters.values()
        if each.name not in NOT_OF_A_SERVICE
    ]
    signature = inspect.Signature([*options, own])
    vars(install).update(__signature__=signature)
    return install


@service.command()
@_with_options_of_the_daemon
def install(
    *,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print what would be written, and do nothing.")
    ] = False,
    **given: Any,
) -> None:
    """Have systemd start the daemon when you log in, within the hours and limits given."""
    from p2p_dtfm.daemon.machine.settings import resolve
    from p2p_dtfm.daemon.peers.guests.pasted_line import with_invitation

    typed = {name: value for name, value in given.items() if value is not None and value != []}
    refuse_what_is_no_value(typed)
    # what is wrong is said now, not in a log that nobody reads
    resolved = resolve(None, typed)
    with_invitation(resolved.settings)
    meant = resolved.settings.model_dump(mode="json")
    values: dict[str, Any] = {
        name: str(Path(meant[name]).absolute())
        if name in DIRECTORIES and meant[name]
        else meant[name]
        for name, origin in resolved.origins.items()
        if (origin != "default" or name in WHEREVER_IT_IS) and name not in NOT_OF_A_SERVICE
    }
    _require_text(values)
    unit, settings = places()
    text = unit_text(_program(), settings, values.get("resident_gib", 0.0))
    if print_only:
        typer.echo(f"# {unit}\n{text}\n# {settings}\n{settings_text(values)}", nl=False)
        return
    _require_sense(with_invitation(resolved.settings))
    _require_systemd()
    _require_manager()
    if unit.exists():
        raise UserError(
            f"the service is installed already: {unit}",
            (f"change its settings in {settings}", "or remove it: p2p-dtfm service uninstall"),
        )
    home = Home(resolved.settings.home)
    _require_free_home(home)
    if home.root != expanded(USUAL_HOME):  # a service makes no home: its disk may be mounted later
        home.acquire()
        home.release()
    for path, content in ((settings, settings_text(values)), (unit, text)):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)  # before there is an invitation in it
        path.chmod(0o600)
        path.write_text(content, encoding="utf-8")
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", UNIT)
    typer.echo(f"the daemon runs as a service; its settings: {settings}")
    where = home_option(home.root)
    typer.echo(f"see what it does: p2p-dtfm status{where}, p2p-dtfm dashboard{where}")
    typer.echo("to have it run while you are logged out: loginctl enable-linger")


@service.command()
def uninstall() -> None:
    """Let it hand its layers over and end, and remove the service. The home stays."""
    unit, settings = places()
    if not unit.exists():
        raise UserError(f"there is no service: {unit} is missing", "nothing must be removed")
    _require_systemd()
    _require_manager()
    typer.echo("it may take minutes to hand its layers over", err=True)
    _systemctl("disable", "--now", UNIT)
    was_killed = "timeout" in _systemctl("show", "--property=Result", UNIT)
    for path in (unit, settings):
        path.unlink(missing_ok=True)
    _systemctl("daemon-reload")
    if was_killed:
        typer.echo(
            "the service is gone, and was killed as that took too long: its home has what it had "
            "saved before, and what it alone had since then is lost"
        )
        return
    typer.echo("the service is gone; what it has trained stays in its home")


def _require_text(values: dict[str, Any]) -> None:
    """Require that the settings can be written down, before anything is. A name from another system
    may be in another encoding than UTF-8. Raises `UserError`."""
    for name, value in values.items():
        try:
            settings_text({name: value}).encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"--{name.replace('_', '-')} cannot be written into the settings of a service: "
                f"{value!r} is no text in UTF-8",
                "rename it, or name a symbolic link to it",
            ) from error


def _require_sense(settings: "Settings") -> None:
    """Require that the daemon has something to do, at addresses that are possible. A daemon that
    refuses its settings would have ended before anybody looks. Raises `UserError`."""
    from p2p_dtfm.daemon.peers.recall import recall
    from p2p_dtfm.net.contacts.addresses import check_announced_address, check_listen_address

    for address in settings.listen:
        check_listen_address(address)
    for address in settings.announce:
        check_announced_address(address)
    recall(settings)


def _require_free_home(home: Home) -> None:
    """Require that no daemon uses this home. A service that finds its home in use ends for good,
    while the daemon there may belong to a terminal that is closed tonight. Raises `UserError`."""
    if (process := holder_of(home)) is not None:
        raise UserError(
            f"a daemon is already running in {home.root} (process {process})",
            (
                f"have it leave, and then type this again: p2p-dtfm leave{home_option(home.root)}",
                "or give the service a home of its own: --home DIR",
            ),
            exit_code=3,
        )


def _program() -> str:
    """The program as an absolute path, since systemd does not have the user's PATH."""
    beside = Path(sys.executable).with_name("p2p-dtfm")
    found = str(beside) if beside.exists() else shutil.which("p2p-dtfm")
    if found is None:
        raise UserError(
            "p2p-dtfm is not installed as a program",
            "pipx install FILE.whl, with the wheel that you were given",
        )
    return found


def _require_systemd() -> None:
    if shutil.which("systemctl") is None:
        raise UserError(
            "there is no systemctl here: this machine does not use systemd",
            "start p2p-dtfm as this system starts other programs; the settings: "
            "p2p-dtfm service install --print",
        )


def _require_manager() -> None:
    """Nothing is written for a systemd that cannot be told of it. Raises `UserError`."""
    try:
        _systemctl("show-environment")
    except UserError as error:
        raise UserError(
            f"systemd does not answer to this user here: {error.cause}",
            (
                "log in as that user, at the machine or by ssh: su and sudo make no session",
                "or let one be kept without a login: loginctl enable-linger, and try again",
            ),
        ) from error


def _systemctl(*arguments: str) -> str:
    """What systemctl prints."""
    try:
        done = subprocess.run(
            ["systemctl", "--user", *arguments],
            capture_output=True, text=True, timeout=SYSTEMCTL_S + LEAVES_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"systemctl --user does not answer: {error}", "log in anew") from error
    if done.returncode != 0:
        raise UserError(
            f"systemctl --user {' '.join(arguments)}: {done.stderr.strip()}",
            (
                "look at it: systemctl --user status p2p-dtfm",
                "its log: journalctl --user -u p2p-dtfm",
            ),
        )
    return done.stdout
