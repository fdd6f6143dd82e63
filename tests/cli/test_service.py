"""The daemon as a service of its user: what is written, and what is refused before that."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from p2p_dtfm.cli import main, python_fault, system_fault
from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import swarm
from p2p_dtfm.cli.commands.here import service
from p2p_dtfm.cli.commands.run import run_daemon
from p2p_dtfm.cli.terminal.durations import seconds_of
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.invited.line import open_line
from p2p_dtfm.daemon.machine.home import Home, require_made
from p2p_dtfm.daemon.machine.settings import Settings, resolve
from p2p_dtfm.daemon.peers.recall import recall

PEER = "12D3KooWDTS2zccYgYAVktrACJybE6dvK6Zvyh2gzZBptHFXCyLG"
GIVEN = ["--initial-peers", f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}", "--hours", "22-07",
         "--resident-gib", "2", "--name", "Ada \"the 1st\""]  # fmt: skip
LINE = open_line("ab" * 32, [f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}"]).text()
VOLUNTEER = Path(__file__).parents[2] / "docs" / "volunteer.md"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "a folder"))
    monkeypatch.setattr(service, "_program", lambda: "/opt/p2p dtfm/bin/p2p-dtfm")
    return tmp_path / "a folder"


def options() -> dict[str, Any]:
    """The options that `service install` takes, by name."""
    program: Any = typer.main.get_command(app)
    install = program.commands["service"].commands["install"]
    return {name: each for each in install.params for name in (*each.opts, *each.secondary_opts)}


def test_what_the_page_for_volunteers_sets_can_be_set_of_the_service() -> None:
    rows = re.findall(r"^\| (`--.*?) \|", VOLUNTEER.read_text(), re.MULTILINE)
    named = set(re.findall(r"`(--[a-z-]+)", " ".join(rows)))
    assert len(named) >= 9
    named |= {"--initial-peers", "--invite", "--device", "--listen", "--no-publish"}
    assert (
        named | {"--no-relay", "--no-nearby", "--no-direct-lines", "--no-port-mapping"}
        <= options().keys()
    )


def test_each_option_of_the_service_is_a_setting_of_the_daemon() -> None:
    names = {each.name for each in options().values()}
    assert names - {"print_only"} <= Settings.model_fields.keys()
    assert not names & {"run", "new", "log"}, "the unit has a log of its own, and founds nothing"


def test_a_pasted_invitation_and_what_may_be_said_of_a_network(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_require_systemd", lambda: None)
    monkeypatch.setattr(service, "_systemctl", lambda *words: None)
    monkeypatch.chdir(home.parent)
    given = ["--invite", LINE, "--network", "lan", "--device", "cpu", "--listen",
             "/ip4/0.0.0.0/tcp/31330", "--no-publish", "--no-relay", "--no-nearby",
             "--home", "at-home"]  # fmt: skip
    done = CliRunner().invoke(app, ["service", "install", *given])
    assert done.exit_code == 0, done.output
    found = resolve(home / "p2p-dtfm/service.toml", {}).settings
    assert (found.invite, found.network, found.device) == (LINE, "lan", "cpu")
    assert found.listen == ("/ip4/0.0.0.0/tcp/31330",)
    assert (found.publish, found.relay, found.nearby) == (False, False, False)
    assert found.home == home.parent / "at-home", "systemd starts it elsewhere"
    assert f"p2p-dtfm status --home {found.home}," in done.output
    assert (found.home / "identity.key").exists(), "the service itself makes no home"


def test_what_the_environment_says_is_said_to_systemd_too(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd has another environment: the service had another home than the commands looked at."""
    monkeypatch.chdir(home.parent)
    monkeypatch.setenv("P2P_DTFM_HOME", "big disk/home")
    monkeypatch.setenv("P2P_DTFM_THREADS", "3")
    monkeypatch.setenv("P2P_DTFM_RESIDENT_GIB", "1.5")
    monkeypatch.setenv("P2P_DTFM_LOG", "human")
    done = CliRunner().invoke(app, ["service", "install", "--print", "--threads", "2"])
    assert done.exit_code == 0, done.output
    settings = tomllib.loads(done.output.partition("service.toml\n")[2])
    where = str(home.parent / "big disk/home")
    assert settings == {"home": where, "threads": 2, "resident_gib": 1.5}, "flags come first"
    assert "MemoryMax=1536M" in done.output


def test_a_home_that_nobody_names_is_said_to_systemd_too(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The home follows from XDG_DATA_HOME, which systemd does not have."""
    monkeypatch.delenv("P2P_DTFM_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(home.parent / "big disk"))
    done = CliRunner().invoke(app, ["service", "install", "--print"])
    assert done.exit_code == 0, done.output
    settings = tomllib.loads(done.output.partition("service.toml\n")[2])
    assert settings == {"home": str(home.parent / "big disk/p2p-dtfm")}


def test_a_name_is_read_again_as_it_was_typed() -> None:
    """A name with a picture in it made a file that the daemon could not read. The service ended at
    once, and again at each log-in."""
    values = {"name": "Ada \U0001f600", "home": '/home/\u00fc/a "b"\x7f', "nearby": False}
    assert tomllib.loads(service.settings_text(values)) == values


def test_a_damaged_invitation_is_refused_before_anything_is_written(home: Path) -> None:
    done = CliRunner().invoke(app, ["service", "install", "--invite", LINE[:-9]])
    assert isinstance(done.exception, UserError) and "invitation" in done.exception.cause
    assert not home.exists()


def test_print_shows_all_and_writes_nothing(home: Path) -> None:
    done = CliRunner().invoke(app, ["service", "install", "--print", *GIVEN])
    assert done.exit_code == 0, done.output
    assert 'ExecStart="/opt/p2p dtfm/bin/p2p-dtfm" --config' in done.output
    assert "MemoryMax=2048M" in done.output and 'hours = "22-07"' in done.output
    assert not home.exists()


@pytest.mark.parametrize("result", ["success", "timeout"])
def test_install_and_uninstall(home: Path, monkeypatch: pytest.MonkeyPatch, result: str) -> None:
    """The service had two minutes to hand its layers over and was then killed. The command said
    that its training stays."""
    asked: list[tuple[str, ...]] = []

    def systemctl(*words: str) -> str:
        asked.append(words)
        return f"Result={result}\n" if words[0] == "show" else ""

    monkeypatch.setattr(service, "_require_systemd", lambda: None)
    monkeypatch.setattr(service, "_systemctl", systemctl)
    done = CliRunner().invoke(app, ["service", "install", *GIVEN])
    assert done.exit_code == 0, done.output
    unit, settings = home / "systemd/user/p2p-dtfm.service", home / "p2p-dtfm/service.toml"
    found = resolve(settings, {}).settings
    assert (found.hours, found.resident_gib, found.name) == ("22-07", 2.0, 'Ada "the 1st"')
    assert set(tomllib.loads(settings.read_text())) <= set(Settings.model_fields)
    assert asked == [
        ("show-environment",), ("daemon-reload",), ("enable", "--now", "p2p-dtfm.service")
    ]  # fmt: skip
    asked.clear()
    again = CliRunner().invoke(app, ["service", "install", *GIVEN])
    assert isinstance(again.exception, UserError) and "already" in again.exception.cause
    assert "TimeoutStopSec=900\n" in unit.read_text()
    done = CliRunner().invoke(app, ["service", "uninstall"])
    assert done.exit_code == 0, done.output
    assert ("stays in its home" in done.stdout) is (result == "success")
    assert ("was killed as that took too long" in done.stdout) is (result == "timeout")
    assert not unit.exists() and not settings.exists() and asked[2][0] == "disable"
    gone = CliRunner().invoke(app, ["service", "uninstall"])
    assert isinstance(gone.exception, UserError)


@pytest.mark.parametrize("order", ["leave", "pause", "pause --for 3d"])
def test_who_stops_a_service_for_a_while_is_told_how_long_that_lasts(
    home: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """A pause of three days ended with the next start of the machine. A service that had left came
    back after the next log-in."""
    monkeypatch.setattr(service, "_require_systemd", lambda: None)
    monkeypatch.setattr(service, "_systemctl", lambda *words: "")
    monkeypatch.setattr(swarm, "call_daemon", lambda *words: None)
    own, other = home.parent / "own", home.parent / "other"

    def said(where: Path) -> str:
        return CliRunner().invoke(app, [*order.split(), "--home", str(where)]).output

    assert "service" not in said(own)
    done = CliRunner().invoke(app, ["service", "install", "--home", str(own), *GIVEN])
    assert done.exit_code == 0, done.output
    assert "when you log in, or the machine starts; p2p-dtfm service uninstall" in said(own)
    assert "service" not in said(other), "which is begun by hand"


def test_where_systemd_cannot_be_told_nothing_is_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unheard(*words: str) -> None:
        raise UserError(f"systemctl --user {words[0]}: no bus", "see its log")

    monkeypatch.setattr(service, "_require_systemd", lambda: None)
    monkeypatch.setattr(service, "_systemctl", unheard)
    done = CliRunner().invoke(app, ["service", "install", *GIVEN])
    assert isinstance(done.exception, UserError) and "no bus" in done.exception.cause
    assert any("loginctl enable-linger" in fix for fix in done.exception.fixes)
    assert not home.exists()


def test_what_is_wrong_is_said_before_anything_is_written(home: Path) -> None:
    done = CliRunner().invoke(app, ["service", "install", "--hours", "late"])
    assert isinstance(done.exception, UserError) and "hours" in done.exception.cause
    assert not home.exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "nothing says what to do"),
        (["--initial-peers", "nonsense"], "malformed address 'nonsense'"),
        ([*GIVEN, "--listen", "31330"], "malformed address '31330'"),
        ([*GIVEN, "--announce", "example.org"], "malformed address 'example.org'"),
    ],
)
def test_a_daemon_that_would_end_at_once_is_no_service(
    given: list[str], told: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command said that the service runs. The service's log, which nobody reads, said why it
    had ended."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(service, "_require_systemd", lambda: None)
    monkeypatch.setattr(service, "_systemctl", lambda *words: asked.append(words))
    monkeypatch.setenv("P2P_DTFM_HOME", str(home.parent / "empty"))
    done = CliRunner().invoke(app, ["service", "install", *given])
    assert isinstance(done.exception, UserError) and told in done.exception.cause, done.output
    assert not home.exists() and not asked


def test_a_service_beside_a_daemon_that_runs_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service found its home in use and ended for good. The other daemon ended with its
    terminal."""
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(service, "_require_systemd", lambda: None)
    monkeypatch.setattr(service, "_systemctl", lambda *words: asked.append(words))
    root = home.parent / "in use"
    root.mkdir()
    given = ["service", "install", "--home", str(root), *GIVEN]
    with subprocess.Popen(["sleep", "60"]) as daemon:
        try:
            (root / "daemon.lock").write_text(str(daemon.pid))
            done = CliRunner().invoke(app, given)
        finally:
            daemon.kill()
    assert isinstance(done.exception, UserError), done.output
    assert done.exception.exit_code == 3
    assert f"already running in {root} (process {daemon.pid})" in done.exception.cause
    assert f"p2p-dtfm leave --home '{root}'" in done.exception.fixes[0]
    assert not home.exists() and ("enable", "--now", service.UNIT) not in asked
    assert CliRunner().invoke(app, given).exit_code == 0, "it has left"


@pytest.mark.parametrize("given", [{}, {"initial_peers": (GIVEN[1],)}])
def test_a_service_whose_disk_is_not_there_yet_is_begun_again(
    given: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was mounted after log-in. The service ended for good, or became another peer
    there."""
    disk = home.parent / "disk"
    settings = Settings(home=disk / "p2p", **given)
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    for be_there in (lambda: None, disk.mkdir, settings.home.mkdir):
        be_there()
        before = sorted(home.parent.rglob("*"))
        with pytest.raises(UserError, match="its disk may not be there yet") as later:
            run_daemon(settings)
        assert later.value.exit_code == 6, "which systemd takes for a reason to begin it again"
        assert sorted(home.parent.rglob("*")) == before
    (settings.home / "runs").mkdir()
    require_made(settings.home)
    if not given:  # what it remembers could not be read, or is gone
        with pytest.raises(UserError, match="nothing says what to do") as nothing:
            recall(settings)
        assert nothing.value.exit_code == 6, "for which a service tries again"
    in_the_way = Home(Path(__file__) / "home")
    with pytest.raises(UserError, match="cannot use") as unusable:
        in_the_way.acquire()
    assert unusable.value.exit_code == 6
    monkeypatch.delenv("SYSTEMD_EXEC_PID")
    with pytest.raises(UserError, match="cannot use") as unusable:
        in_the_way.acquire()
    assert unusable.value.exit_code == 2, "who typed it sees to it"


def test_a_service_without_a_directory_of_its_user_has_the_home_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit without HOME ended for good, whatever else was set."""
    home, expanded = tmp_path / "home", Path.expanduser

    def unknown(path: Path) -> Path:
        if path.parts[0] == "~":
            raise RuntimeError("Could not determine home directory.")
        return expanded(path)

    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(UserError, match="its disk may not be there yet") as later:
        require_made(home)
    assert later.value.exit_code == 6
    (home / "runs").mkdir(parents=True)
    require_made(home)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_understands_every_line(tmp_path: Path) -> None:
    unit = tmp_path / service.UNIT
    unit.write_text(service.unit_text("/bin/true", tmp_path / "100% a \\ $x.toml", 1.5))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", unit],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0 and str(unit) not in done.stderr, done.stderr


def test_an_old_python_is_told_in_one_sentence() -> None:
    assert not python_fault(sys.version_info)
    said = python_fault((3, 9, 2))
    assert "needs Python 3.11 or later and this is 3.9.2" in said and "\n" not in said
    assert "pipx install --python python3.11 FILE.whl" in said, "no index has it"


def test_another_system_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ended with a traceback, and so did the doctor on macOS."""
    assert not system_fault("linux")
    for system in ("darwin", "win32"):
        monkeypatch.setattr(sys, "platform", system)
        with pytest.raises(SystemExit, match="2"):
            main()
        said = capsys.readouterr().err
        assert said == f"{system_fault(system)}\n" and f"needs Linux and this is {system}" in said


def test_lengths_of_time() -> None:
    found = [seconds_of(text) for text in ("2h", "45m", "1h30m", "3d", "90s", " 1 H ")]
    assert found == [7200, 2700, 5400, 259_200, 90, 3600]
    for wrong in ("", "0h", "h", "2", "-1h", "1h1d", "9" * 40 + "h"):
        with pytest.raises(UserError):
            seconds_of(wrong)


def test_a_wrong_length_of_time_is_answered_with_the_option_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`invite --expires 3` was told to write `--for 2h`, which `invite` does not have."""
    for command, option in (("invite", "--expires"), ("pause", "--for")):
        monkeypatch.setattr(sys, "argv", ["p2p-dtfm", command, option, "3"])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert f": {option} 2h" in capsys.readouterr().err
