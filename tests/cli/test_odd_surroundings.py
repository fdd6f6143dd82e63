"""A program is not always started in a terminal by a user with a home: streams are closed, disks
full, directories gone, variables not set. It says in words what it then cannot do."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli import main
from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import swarm
from p2p_dtfm.cli.terminal.mistyped import fault_of_path
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine import home as homes
from p2p_dtfm.daemon.machine.before_start import data_directory
from p2p_dtfm.daemon.machine.home import Home, home_option
from p2p_dtfm.daemon.machine.local_client import PATIENCE_S, call_daemon
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.peers.recall import recall
from p2p_dtfm.ports.packages import python_command
from tests.core.builders import run_spec

STREAMS = """
import os, sys
for number in map(int, sys.argv.pop(1)):
    os.close(number)
sys.stdin, sys.stdout, sys.stderr = (
    None if each.fileno() not in map(int, os.listdir("/proc/self/fd")) else each
    for each in (sys.stdin, sys.stdout, sys.stderr)
)
from p2p_dtfm.cli import open_closed_streams
open_closed_streams()
with open(sys.argv[1], "w") as file:
    print("standard output")
    print("standard errors", file=sys.stderr)
    sys.stdout.flush()
    os.write(1, b"of a library")
    file.write(f"{file.fileno() > 2} {sys.stdin.read()!r}")
"""


def typed(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(str(caught.value.code))


@pytest.mark.parametrize(
    "line",
    ["--home ~{} --show-config", "--home ~{}/x --run tiny", "status --home ~{}",
     "id --home ~{}/x", "--tensorboard ~{}/x --show-config", "bootstrap --home ~{}"],
)  # fmt: skip
def test_a_slash_that_was_forgotten_behind_the_tilde_is_no_bug(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The shell leaves `~second` as it is, where no user has that name."""
    monkeypatch.chdir(tmp_path)
    assert typed(*line.format("second").split(), monkeypatch=monkeypatch) == 2
    told = capsys.readouterr().err
    assert "there is no user 'second' here" in told and "~/second" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["home", "home/runs"])
def test_a_home_of_another_user_is_not_one_without_a_past(
    folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who had once typed sudo was told that the home remembers no run, and to found one there,
    where nothing can be written."""
    (tmp_path / "home" / "runs").mkdir(parents=True)
    listed = os.scandir

    def refused(path: Path) -> object:
        if path == tmp_path / folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError) as caught:
        recall(Settings(home=tmp_path / "home"))
    assert caught.value.cause == f"cannot use {tmp_path / folder}: Permission denied"


def test_a_path_of_another_user_is_told_with_what_to_see_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The fix was to read the command's help."""
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert typed("status", "--home", str(tmp_path), monkeypatch=monkeypatch) == 2
    told = capsys.readouterr().err
    assert "is not readable" in told and "ls -ld" in told and "--help" not in told


def test_data_of_a_user_who_is_not_there(tmp_path: Path) -> None:
    spec = run_spec()
    spec = spec.model_copy(update={"data": spec.data.model_copy(update={"source": "~second/my"})})
    with pytest.raises(UserError, match="no user 'second' here"):
        data_directory(spec, tmp_path / "run.toml")


def test_who_has_no_directory_names_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some containers have a user without a name. Even with a named home the program ended with
    "this is a bug"."""

    def unknown(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setattr(homes.Path, "expanduser", unknown)
    with pytest.raises(UserError, match="knows no directory of this user's"):
        Settings()
    monkeypatch.undo()
    monkeypatch.setattr(homes, "default_home", lambda: (_ for _ in ()).throw(UserError("none")))
    assert home_option(tmp_path) == f" --home {tmp_path}"


def test_who_has_no_directory_has_no_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`leave` had done what it was told, and then ended with 2 over a file of the service."""

    def unknown(path: Path) -> Path:
        if path.parts[:1] == ("~",):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(homes.Path, "expanduser", unknown)
    monkeypatch.setattr(swarm, "call_daemon", lambda *told: {})
    done = CliRunner().invoke(app, ["leave", "--home", str(tmp_path)])
    assert (done.exit_code, done.exception) == (0, None)


@pytest.mark.parametrize("line", ["demo --peers 1", "chaos --storm"])
def test_no_room_for_temporary_files_is_no_bug(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk. Python names no path then, and there was a traceback."""

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", nowhere)
    assert typed(*line.split(), monkeypatch=monkeypatch) == 2
    assert "error: no folder for temporary files: No usable" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["id --home", "bootstrap --home", "reproduce --quick --out",
                                  "prepare . --out new --validation"])  # fmt: skip
@pytest.mark.parametrize("joined", [False, True])
def test_a_variable_that_is_not_set_fills_no_directory(
    line: str,
    joined: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """`id --home "$PLACE"` made an identity in whatever directory its user was in."""
    monkeypatch.chdir(tmp_path)
    words = [f"{line}="] if joined else [line, ""]
    typed_words = [part for word in words for part in (word.split() or [""])]
    assert typed(*typed_words, monkeypatch=monkeypatch) == 2
    assert "stands without a value: '' follows it" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["prepare", "", "--out", "new"], ["prepare", "a", "", "--out", "new"],
     ["prepare", "--overwrite", "", "--out", "new"], ["import", "", "--out", "new"],
     ["export", "--out", "new", ""], ["generate", "--prompt", "", ""], ["compare", "", "b"]],
    ids=" ".join,
)  # fmt: skip
def test_a_variable_that_is_not_set_is_no_place_to_read(
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """`prepare "$TEXTS" --out DIR` prepared all that lay in whatever directory its user was in, for
    members of a run to fetch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("private " * 4096)
    assert typed(*words, monkeypatch=monkeypatch) == 2
    assert f"one of the paths behind {words[0]} is empty" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_text_may_be_empty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert typed("generate", str(tmp_path), "--prompt", "", monkeypatch=monkeypatch) == 2
    assert "no checkpoint with all layers" in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])  # with "" Python keeps it back, and tries again
def test_what_is_printed_onto_a_full_disk_is_no_bug(unbuffered: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m p2p_dtfm spec tiny >/dev/full"],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert done.returncode == 2
    cause = "error: a disk is full: No space left on device"
    assert done.stderr == f"{cause}\nfix: free space there\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_error_that_cannot_be_printed_has_its_exit_code(unbuffered: str, tmp_path: Path) -> None:
    """It ended with 1, which stands for a bug."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m p2p_dtfm status --home {tmp_path} 2>/dev/full"],
        timeout=120, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert done.returncode == 4


def test_from_a_directory_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    try:
        assert typed("id", "--home", "mine", monkeypatch=monkeypatch) == 2
    finally:
        os.chdir(tmp_path)
    assert "the directory that you are in is there no more" in capsys.readouterr().err
    assert fault_of_path(FileNotFoundError(2, "No such file or directory")) is None


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_no_file_gets_what_was_meant_for_a_stream_that_is_closed(
    closed: str, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"
    subprocess.run(
        [sys.executable, "-c", STREAMS, closed, str(path)],
        stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert path.read_text() == "True ''"


def test_letters_that_a_terminal_has_not_are_told_by_their_numbers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "p2p_dtfm", "--help"],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0 and "--initial-peers" in done.stdout, done.stderr


def test_letters_that_the_plainest_locale_has_not_are_told_by_their_numbers() -> None:
    """There Python lets bytes of names through, and no other letter: `generate` ended with a
    traceback at the first one, in the middle of its text."""
    line = "from p2p_dtfm.cli import open_closed_streams as o; o(); print('caf\\xe9 \\u2192')"
    done = subprocess.run(
        [sys.executable, "-c", line],
        capture_output=True, text=True, timeout=60,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    assert done.stdout == "caf\\xe9 \\u2192\n", done.stderr


def test_a_home_on_a_full_disk_or_without_locks_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a disk that keeps no locks the program said that a daemon is running there already."""

    def no_locks(file: object, how: int) -> None:
        raise OSError(95, "Operation not supported")

    def is_held(file: object, how: int) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(homes.fcntl, "flock", no_locks)
    with pytest.raises(UserError) as caught:
        Home(tmp_path).acquire()
    assert caught.value.exit_code == 2 and "it cannot be locked, Operation not" in str(caught.value)
    monkeypatch.setattr(homes.fcntl, "flock", is_held)
    with pytest.raises(UserError) as caught:
        Home(tmp_path).acquire()
    assert caught.value.exit_code == 3 and "already running" in caught.value.cause


def test_the_disk_of_a_home_is_full(tmp_path: Path) -> None:
    """The disk has no room even for the process's number. A bootstrap node ended with a
    traceback."""
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(UserError, match=r"cannot use .*: File too large"):
            Home(tmp_path).acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_command_does_not_take_itself_for_a_daemon_that_has_ended(tmp_path: Path) -> None:
    """In containers one program after another has the number 1: `status` waited for itself."""
    (tmp_path / "daemon.lock").write_text(str(os.getpid()))
    began_s = time.monotonic()
    with pytest.raises(UserError, match="was not started there, or has ended") as caught:
        call_daemon(tmp_path, "status")
    assert caught.value.exit_code == 4 and time.monotonic() - began_s < PATIENCE_S


def test_what_lies_about_where_it_is_started_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--device all` looked for cards in another process, which imported the torch in that
    directory."""
    (tmp_path / "torch.py").write_text("class cuda:\n    device_count = lambda: 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/usr/local/bin", *sys.path])
    told = subprocess.run(
        python_command("-c", "import torch; print(torch.__file__)"),
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    assert not told.startswith(str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert "-P" not in python_command(), "sources that were never installed"


def test_a_daemon_whose_directory_is_gone_can_begin_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon was started there weeks ago. To pause, it has to start the process that stays in
    its place."""

    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    assert python_command("-c", "pass") == [sys.executable, "-P", "-c", "pass"]
