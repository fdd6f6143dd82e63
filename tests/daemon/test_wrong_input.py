"""A user who types something wrong is told the cause, and what is right."""

import errno
import logging
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from p2p_dtfm.cli import main
from p2p_dtfm.cli.commands.data import prepare
from p2p_dtfm.cli.commands.offline.newest_model import newest_checkpoint
from p2p_dtfm.cli.commands.run import run_daemon
from p2p_dtfm.cli.terminal.mistyped import fault_of_path
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.daemon.machine.before_start import check_before_start
from p2p_dtfm.daemon.machine.home import fault_of_home
from p2p_dtfm.daemon.machine.settings import Settings, given_zeros, resolve
from p2p_dtfm.daemon.machine.world import Machine
from p2p_dtfm.daemon.peers.checks.check import Grade
from p2p_dtfm.daemon.peers.checks.ports import check_ports
from p2p_dtfm.net.contacts.addresses import (
    check_announced_address,
    check_listen_address,
    parse_address,
)
from p2p_dtfm.sim.scenario.files import find_run_spec, read_run_spec
from p2p_dtfm.sim.scenario.scenario import parse_scenario
from p2p_dtfm.train.stage.measure import measure_device
from p2p_dtfm.train.stage.room_to_train import require_room
from tests.core.builders import run_spec
from tests.documentation.pages import ROOT

GIB = 1 << 30


def refused(**flags: object) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve(None, flags)
    assert caught.value.exit_code == 2 and caught.value.fixes
    return caught.value


@pytest.mark.parametrize(
    ("flags", "cause", "fix"),
    [
        ({"hours": "22"}, "must be two times of day", '"22-07"'),
        ({"threads": -1}, "must be 0 or more, not -1", "0: half of the cores"),
        ({"threads": "many"}, "must be a whole number", "0: half"),
        ({"uplink_mbps": -1.0}, "must be 0 or more", "0: no limit"),
        ({"disk_gib": float("inf")}, "must be a finite number", "0: no limit"),
        ({"disk_gib": 0.0001}, "must be 0, or 0.01 at least", "0: no limit"),
        ({"uplink_mbps": 0.00001}, "must be 0, or 0.01 at least", "0: no limit"),
        ({"memory_gib": float("nan")}, "must be a finite number", "nearly all that is free"),
        ({"network": "wann"}, "must be 'auto', 'lan' or 'wan', not 'wann'", "wan"),
        ({"dashboard": "99999"}, 'must be a port from 1 to 65535, "auto" or "off"', "port"),
        ({"run_digest": "zz"}, "must be a digest", "run"),
        ({"threads": True}, "must be a whole number, not True", "0: half of the cores"),
        ({"memory_gib": False}, "must be a number, not False", "nearly all that is free"),
        ({"public_status": True}, "must be a whole number, not True", "port of a page"),
        ({"dashboard": True}, 'must be a port from 1 to 65535, "auto" or "off"', "port"),
        ({"name": True}, "must be text, in double quotes", "what others see"),
        ({"network": True}, "must be 'auto', 'lan' or 'wan', not True", "wan"),
        ({"tensorboard": True}, "must be a path, in double quotes, not True", "TensorBoard"),
    ],
)
def test_a_wrong_setting_is_told_in_words(flags: dict, cause: str, fix: str) -> None:
    error = refused(**flags)
    assert cause in error.cause and fix in error.fixes[0]
    assert "pattern" not in error.cause and "Input" not in error.cause


def test_what_a_zero_stands_for_is_said_where_somebody_gave_one() -> None:
    given = resolve(None, {"uplink_mbps": 0.0, "threads": 0, "disk_gib": 3.0, "nearby": False})
    said = ["threads is 0, which is half of the cores", "uplink_mbps is 0, which is no limit"]
    assert given_zeros(given.settings) == said
    day = resolve(None, {"hours": "7-7"}).settings
    assert given_zeros(day) == ["hours is 7-7, which is the whole day"]
    assert given_zeros(resolve(None, {}).settings) == []


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"name": 3}, "name: must be text, in double quotes"),
        ({"name": "Two words"}, "name: must be a name of at most 63"),
        ({"total_steps": "many"}, "total_steps: must be a whole number"),
        ({"seed": 1e30}, "seed: must be a smaller whole number"),
        ({"total_steps": 0}, "total_steps: must be 1 or more"),
        ({"model": 5}, "model: must be a table"),
        ({"data": {"manifest": "zz"}}, "data.manifest: must be a digest"),
    ],
)
def test_a_wrong_run_spec_is_told_in_words(changes: dict, cause: str) -> None:
    values = {**run_spec().model_dump(mode="json"), **changes}
    with pytest.raises(UserError) as caught:
        parse_run_spec(values, "run.toml")
    assert cause in caught.value.cause
    assert "Input" not in caught.value.cause and "pattern" not in caught.value.cause


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000 + "]" * 3000], ids=["digits", "nested"])
def test_what_no_parser_declares_is_told_in_words(value: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"total_steps = {value}\n")
    with pytest.raises(UserError, match="is not valid TOML"):
        read_run_spec(path)
    with pytest.raises(UserError, match="not valid TOML"):
        parse_scenario(path.read_text(), "mine.toml")


@pytest.mark.parametrize("key", ["count", "memory_gb", "bandwidth_mbps", "factor"])
def test_true_is_no_number_in_a_scenario(key: str) -> None:
    """Three peers became one, and a link one of 1 Mbit/s, without a word."""
    text = (ROOT / "configs" / "scenarios" / "three-homes.toml").read_text()
    before, _, after = text.partition(f"\n{key} = ")
    with pytest.raises(UserError) as caught:
        parse_scenario(f"{before}\n{key} = true\n{after.partition(chr(10))[2]}", "mine.toml")
    assert f"{key} is true, and must be a number" in caught.value.cause


def test_a_key_that_stands_twice_is_not_chosen_from(tmp_path: Path) -> None:
    """TOML refuses it; of a run spec in JSON the last one counted, without a word."""
    text = run_spec().model_dump_json()
    assert '"microbatch":' in text
    path = tmp_path / "run.json"
    path.write_text(text.replace('"microbatch":', '"microbatch":1,"microbatch":', 1))
    with pytest.raises(UserError, match="not valid JSON: 'microbatch' stands twice"):
        read_run_spec(path)


def test_all_wrong_settings_are_told_at_once() -> None:
    error = refused(threads=-1, hours="now", network="wann")
    assert all(name in error.cause for name in ("threads", "hours", "network"))
    assert len(error.fixes) == 3


def test_a_limit_of_nothing_says_what_it_means() -> None:
    shown = resolve(None, {"uplink_mbps": 0.0, "disk_gib": 3.0}).describe()
    assert "uplink_mbps        = 0.0, which is no limit  (flag)" in shown
    assert "disk_gib           = 3.0  (flag)" in shown


@pytest.mark.parametrize("text", ["nonsense", "0.0.0.0:31330", "/ip4/0.0.0.0", "/ip4/1.2.3/tcp/1"])
def test_an_address_to_listen_on_is_not_told_to_end_in_a_peer_id(text: str) -> None:
    with pytest.raises(UserError) as caught:
        check_listen_address(text)
    told = " ".join(caught.value.fixes)
    assert "/p2p" not in told and "/ip4/0.0.0.0/tcp/31330" in told
    with pytest.raises(UserError) as caught:
        parse_address(text)
    assert "/p2p/" in caught.value.fixes[0]


def test_an_address_to_listen_on_that_names_a_peer() -> None:
    with pytest.raises(UserError) as caught:
        check_listen_address("/ip4/0.0.0.0/tcp/1/p2p/12D3KooW")
    assert "leave out /p2p/" in caught.value.fixes[0]


def test_an_address_that_nobody_can_call_is_not_told_to_others() -> None:
    assert check_announced_address("/ip4/192.0.2.7/tcp/4001") == "/ip4/192.0.2.7/tcp/4001"
    assert check_announced_address("/dns4/example.org/tcp/4001")
    for text in ("/ip4/192.0.2.7/tcp/0", "/ip4/0.0.0.0/tcp/4001", "foo"):
        with pytest.raises(UserError) as caught:
            check_announced_address(text)
        told = " ".join(caught.value.fixes)
        assert "203.0.113.7" in told and "port 0 takes" not in told


def test_a_mistyped_run_spec_is_recognised() -> None:
    with pytest.raises(UserError) as caught:
        find_run_spec("tinny")
    assert caught.value.fixes[0] == "did you mean tiny?"
    with pytest.raises(UserError) as caught:
        find_run_spec("something-else")
    assert "did you mean" not in caught.value.fixes[0]


def test_a_directory_is_no_run_spec_and_the_one_in_it_is_named(tmp_path: Path) -> None:
    """`p2p-dtfm import --out` makes such a directory."""
    with pytest.raises(UserError, match="is a directory") as caught:
        find_run_spec(str(tmp_path))
    assert "did you mean" not in caught.value.fixes[0]
    (tmp_path / "run.toml").touch()
    with pytest.raises(UserError) as caught:
        find_run_spec(str(tmp_path))
    assert caught.value.fixes[0] == f"did you mean {tmp_path}/run.toml?"


def test_a_run_spec_is_read_before_anything_is_started(tmp_path: Path) -> None:
    for settings in (
        Settings(home=tmp_path, run="tinny"),
        Settings(home=tmp_path, run="tiny", listen=("here",)),
        Settings(home=tmp_path, initial_peers=("there",)),
        Settings(home=tmp_path, run=str(written(tmp_path, run_spec(data={"source": "/gone"})))),
    ):
        with pytest.raises(UserError):
            check_before_start(settings)
    check_before_start(Settings(home=tmp_path, run="tiny"))


def written(directory: Path, spec: RunSpec) -> Path:
    path = directory / "run.json"
    path.write_text(spec.model_dump_json())
    return path


def test_a_scenario_is_told_all_its_mistakes_at_once() -> None:
    text = """
name = "x"
[[group]]
name = "a"
count = 2
forward_tflops = 1.0
[[peer]]
name = "b-1"
[[link]]
from = "a"
to = "q"
latency_ms = 1
bandwidth_mbps = 5
[[fault]]
at_step = 1
kind = "kill"
peer = "a-7"
[[fault]]
at_step = 1
kind = "kil"
peer = "a-1"
"""
    with pytest.raises(UserError) as caught:
        parse_scenario(text, "mine.toml")
    for mistake in ("mine.toml:8: ", "mine.toml:11: ", "mine.toml:17: ", "mine.toml:20: fault.2"):
        assert mistake in caught.value.cause


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"layers": 1, "width": 65536, "heads": 512, "context": 8, "vocabulary": 1 << 24}},
        {"model": {"layers": 1, "width": 64, "heads": 2, "context": 1 << 20, "vocabulary": 256},
         "batch": {"global_batch": 64, "microbatch": 64},
         "evaluation": {"every_steps": 50, "sequences": 64}},
        {"batch": {"global_batch": 1 << 16, "microbatch": 1 << 16},
         "model": {"layers": 1, "width": 256, "heads": 2, "context": 1024, "vocabulary": 256},
         "evaluation": {"every_steps": 50, "sequences": 1 << 16}},
    ],
)  # fmt: skip
def test_a_run_too_large_for_any_machine_is_refused_in_words(changes: dict, tmp_path: Path) -> None:
    spec = run_spec(**changes)
    with pytest.raises(UserError) as caught:
        measure_device(spec, "cpu", 1)
    assert "too large for this machine" in caught.value.cause and "GiB" in caught.value.cause
    with pytest.raises(UserError, match="too large"):
        check_before_start(Settings(home=tmp_path, run=str(written(tmp_path, spec))))


def test_a_run_that_fits_is_not_refused() -> None:
    require_room(run_spec(), GIB)


def text_in(directory: Path) -> Path:
    path = directory / "text.txt"
    path.write_text("\n".join(f"line {number} of a text" for number in range(2000)))
    return path


def test_prepared_data_are_not_replaced_unasked(tmp_path: Path, capsys) -> None:
    text, out = text_in(tmp_path), tmp_path / "data"
    make(text, out)
    before = (out / "manifest.json").read_bytes()
    text.write_text("another text entirely " * 500)
    with pytest.raises(UserError) as caught:
        make(text, out)
    assert "--overwrite" in caught.value.fixes[1]
    assert (out / "manifest.json").read_bytes() == before
    make(text, out, overwrite=True)
    assert (out / "manifest.json").read_bytes() != before
    assert "warning" not in capsys.readouterr().err


def test_more_held_out_than_to_train_on_is_told_with_both_figures(tmp_path: Path, capsys) -> None:
    text, other = text_in(tmp_path), tmp_path / "other.txt"
    other.write_text(text.read_text() * 3)
    make(text, tmp_path / "data", validation=[other])
    warned = capsys.readouterr().err
    assert "more is held out" in warned and warned.count("tokens") >= 1 and "--validation" in warned


def make(text: Path, out: Path, **options: object) -> None:
    """The command, with its defaults."""
    given = {
        "vocabulary": None, "tokenizer": None, "field": "text", "held_out": None,
        "validation": None, "context": 16, "name": "", "licence": "", "source": "",
        "overwrite": False,
    }  # fmt: skip
    prepare([text], out, **{**given, **options})


def test_a_full_disk_is_not_answered_with_another_name_on_it(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(sys.modules["p2p_dtfm.train.data.prepare"], "finish", full)
    with pytest.raises(UserError) as caught:
        make(text_in(tmp_path), tmp_path / "data")
    assert "No space left" in caught.value.cause
    assert "free disk space" in caught.value.fixes[0] and "--out" not in caught.value.fixes[0]


def environment_made_by(tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
    """The result of `make`, with this shell script in the place of Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{python}\n")
    path.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = ["make", f"PYTHON={path}", "environment"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)


def test_make_says_which_python_it_needs(tmp_path: Path) -> None:
    old = '[ "$1" = --version ] && echo "Python 3.9.2"\n[ "$1" = --version ]'
    done = environment_made_by(tmp_path, old)
    assert done.returncode == 2
    assert "older than Python 3.11: Python 3.9.2" in done.stderr and "fix: " in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_make_says_which_package_of_python_it_needs(tmp_path: Path) -> None:
    """Debian and Ubuntu have the module that makes environments in a package of its own."""
    without = 'case "$*" in *ensurepip*|*venv*) exit 1;; esac'
    done = environment_made_by(tmp_path, without)
    assert done.returncode == 2
    assert "cannot make environments" in done.stderr and "python3-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_home_on_a_full_disk_is_no_bug(tmp_path: Path, monkeypatch) -> None:
    def full(_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("p2p_dtfm.daemon.machine.home.Home.acquire", full)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with pytest.raises(UserError) as caught:
            run_daemon(Settings(home=tmp_path, run="tiny", log="json"))
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert "a disk is full" in caught.value.cause and str(tmp_path) in caught.value.fixes[0]


def test_what_lies_in_the_way_in_a_home_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "life.json").mkdir()
    with pytest.raises(OSError) as caught:
        (tmp_path / "life.json").write_bytes(b"")
    assert (
        fault_of_home(caught.value, tmp_path)
        == f"cannot use {tmp_path}/life.json: {os.strerror(errno.EISDIR)}"
    )
    assert fault_of_home(caught.value, tmp_path / "another") == ""
    assert fault_of_home(OSError(5, "Input/output error", str(tmp_path)), tmp_path) == ""


def test_a_port_that_cannot_be_had_is_not_always_somebody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a port that needs root, and for another machine's address, the doctor advised to end a
    program. While a daemon ran, the doctor said that this daemon has the port."""
    for runs in (False, True):
        (found,) = check_ports(["/ip4/192.0.2.7/tcp/31330"], runs)
        assert found.verdict is Grade.FAILED and "no address of this machine" in found.fix

    def refused(self: socket.socket, at: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refused)
    (found,) = check_ports(["/ip4/0.0.0.0/tcp/443"], True)
    assert found.verdict is Grade.FAILED and "for root" in found.fix


def test_a_home_that_is_a_file_is_told_so(monkeypatch, capsys, tmp_path: Path) -> None:
    """A bare start was told to join with that home, and `status` said `[Errno 20]`."""
    path = tmp_path / "file"
    path.write_text("no home")
    for words in (["--home", str(path)], ["status", "--home", str(path)]):
        monkeypatch.setattr("sys.argv", ["p2p-dtfm", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        assert f"{path} is a file, and no home of a daemon" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    ["--run {}", "--home {} --run tiny", "status --home {}", "spec {}", "prepare {} --out o"],
)
def test_a_line_that_was_pasted_in_the_place_of_a_path_is_no_bug(
    line: str, monkeypatch, capsys, tmp_path: Path
) -> None:
    """An invitation is longer than a file's name may be: the user got a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("P2P_DTFM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", *line.format("p2pi1-" + "x" * 400).split()])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "error: cannot use " in error and "File name too long" in error
    assert "--invite LINE" in error and "bug" not in error


def test_what_is_closed_to_this_user_is_told_so_and_the_rest_is_a_bug() -> None:
    closed = fault_of_path(OSError(errno.EACCES, "Permission denied", "/root/x"))
    assert closed is not None and closed.cause == "cannot use /root/x: Permission denied"
    assert fault_of_path(OSError(errno.EIO, "Input/output error", "/x")) is None
    assert fault_of_path(OSError(errno.EACCES, "Permission denied")) is None


def test_an_option_before_a_command_is_not_lost(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", "--home", "/nowhere", "status"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "--home stands before status" in told and "p2p-dtfm status --home" in told


def test_no_data_are_prepared_for_a_context_that_there_is_not(monkeypatch, capsys) -> None:
    words = ["prepare", "text", "--out", "data", "--context", "0"]
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and "--context: must be 1 or more" in capsys.readouterr().err


def test_an_option_before_a_group_belongs_behind_the_command_that_knows_it(
    monkeypatch, capsys
) -> None:
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", "--home", "/nowhere", "service", "install"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "fix: write it behind: p2p-dtfm service install --home" in capsys.readouterr().err


def test_an_option_that_the_command_has_not_is_to_be_left_out(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", "--threads", "1", "status"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert "--threads stands before status" in told and "fix: leave it out: status has no" in told


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("join", "type p2p-dtfm --initial-peers ADDRESS"),
        ("Stop", "type p2p-dtfm leave"),
        ("stauts", "did you mean p2p-dtfm status?"),
        ("hlep", "did you mean p2p-dtfm --help?"),
        ("/ip4/192.0.2.7/tcp/1/p2p/12D3", "p2p-dtfm --initial-peers /ip4/192.0.2.7/tcp/1/p2p/12D3"),
        ("p2pi1-abc", "p2p-dtfm --invite p2pi1-abc"),
        ("my-run.toml", "p2p-dtfm --run my-run.toml"),
        ("qqqq", "p2p-dtfm --help lists all commands"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_a_line_to_type(
    word: str, told: str, monkeypatch, capsys
) -> None:
    """A user types this who has lost the option of a pasted line, or knows another program's
    words."""
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", word])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: there is no command {word!r}") and told in error
    if word == "stauts":
        assert error.count("did you mean") == 1, "who mistypes one letter wants no list"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--threads two", ("--threads: must be a whole number, not 'two'", "fix: --threads: CPU")),
        ("--memory-gib 16GB", ("--memory-gib: must be a number, not '16GB'", "in GiB")),
        ("--nmae Ada", ("p2p-dtfm has no option --nmae", "did you mean --name?")),
        ("chaos --peers 0", ("--peers: must be 3 or more, not '0'", "fix: --peers:")),
        ("prepare", ("p2p-dtfm prepare: missing argument", "p2p-dtfm prepare --help")),
        ("--initial-peers --home here", ("--initial-peers stands without a value", "--home")),
        ("demo twice", ("p2p-dtfm demo: got unexpected", "p2p-dtfm demo --help")),
        ("bootstrap --log x", ("--log: must be one of 'auto', 'human', 'json', not 'x'", "")),
    ],
)
def test_an_option_that_cannot_be_used_is_told_with_cause_and_fix(
    line: str, told: tuple[str, str], monkeypatch, capsys
) -> None:
    """The words are those for a file of settings, not a parser's."""
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", *line.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {told[0]}") and told[1] in error
    assert "Input should" not in error and "Usage:" not in error


@pytest.mark.parametrize(
    "words",
    [["--invite", ""], ["--run", ""], ["--initial-peers", ""], ["--run-digest="],
     ["doctor", "--invite", ""], ["demo", "--run="], ["peers", "--run-digest", ""],
     ["service", "install", "--print", "--invite", ""]],
    ids=" ".join,
)  # fmt: skip
def test_a_run_without_a_name_is_not_another_run(words: list[str], monkeypatch, capsys) -> None:
    """`--invite "$LINE"` took up the home's last run where the variable was not set."""
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    told = "stands without a value: '' follows it"
    option = next(word for word in words if word.startswith("--") and word != "--print")
    assert capsys.readouterr().err.startswith(f"error: {option.rstrip('=')} {told}")


def test_an_empty_home_is_not_the_directory_one_is_in(monkeypatch) -> None:
    """`--home "$PLACE"` gives that where the variable is not set."""
    for name in ("home", "tensorboard"):
        with pytest.raises(UserError) as caught:
            resolve(None, {name: ""})
        assert caught.value.cause == f"{name} (flag): must be the path of a directory, not ''"
    monkeypatch.setenv("P2P_DTFM_HOME", "")
    with pytest.raises(UserError, match="P2P_DTFM_HOME"):
        resolve(None, {})
    monkeypatch.delenv("P2P_DTFM_HOME")
    assert resolve(None, {"home": "."}).settings.home == Path(".")


def test_a_tilde_is_the_users_own_directory_wherever_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell expands it in a file, nor behind `--home=`. Figures went to a directory called ~,
    and no checkpoint was found."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "settings.toml"
    file.write_text('home = "~/there"\ntensorboard = "~/figures"\n')
    found = resolve(file, {}).settings
    assert (found.home, found.tensorboard) == (tmp_path / "there", tmp_path / "figures")
    with pytest.raises(UserError) as nothing:
        newest_checkpoint(Path("~/there"))
    assert str(tmp_path / "there") in nothing.value.cause


def test_a_word_that_is_half_typed_does_not_stop_completion() -> None:
    from typer.main import get_command

    from p2p_dtfm.cli.app import app

    group = get_command(app)
    context = group.make_context("p2p-dtfm", ["stat"], resilient_parsing=True)
    assert group.resolve_command(context, ["stat"])[1] is None  # type: ignore[attr-defined]


def test_a_machine_without_room_for_temporary_files_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.raises(UserError, match=r"no folder for temporary files: .*'/tmp'") as told:
        Machine().lock_folder  # noqa: B018 - it is looked up
    assert "TMPDIR" in str(told.value.fixes)
