"""The command line as people use it: help, settings, exit codes, signals, data and text."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_dtfm.testbed.local_swarm import LocalSwarm
from tests.e2e.helpers import (
    DEADLINE_S,
    Program,
    assert_nothing_is_left,
    logged,
    processes_of,
    run_program,
    state_of,
    step_of,
    wait_until,
    write_spec,
)
from tests.e2e.walking_daemon import MODULE

COMMANDS = [
    *("demo", "plan", "status", "peers", "pause", "resume", "leave", "dashboard", "trace"),
    *("id", "prepare", "generate", "simulate", "chaos"),
]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_explains_itself(command: str, program: Program) -> None:
    code, out, _ = program(*command.split(), "--help")
    assert code == 0
    assert "Usage: p2p-dtfm" in out and len(out.splitlines()) > 5


def test_the_top_help_lists_every_command(program: Program) -> None:
    _, out, _ = program("--help")
    assert all(f" {command} " in out for command in COMMANDS)


def test_version_is_a_line(program: Program) -> None:
    from p2p_dtfm import __version__

    assert program("--version")[:2] == (0, f"{__version__}\n")


@pytest.mark.parametrize(
    "command", ["status", "peers", "plan", "pause", "resume", "leave", "dashboard"]
)
def test_without_a_daemon_commands_say_how_to_start_one(
    command: str, tmp_path: Path, program: Program
) -> None:
    code, out, err = program(command, "--home", tmp_path)
    assert code == 4 and out == ""
    assert f"fix 1: start one: p2p-dtfm --home {tmp_path}" in err


def test_an_id_is_made_once(tmp_path: Path, program: Program) -> None:
    first = program("id", "--home", tmp_path / "home")
    assert first[0] == 0 and first[1].startswith("12D3KooW")
    assert program("id", "--home", tmp_path / "home") == first


def test_show_config_tells_each_origin_and_the_nearest_one_counts(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text('threads = 1\ndevice = "cpu"\nmemory_gib = 1.5\nlisten = ["/ip4/0.0.0.0"]\n')
    monkeypatch.setenv("P2P_DTFM_THREADS", "2")
    monkeypatch.setenv("P2P_DTFM_DEVICE", "cuda")
    monkeypatch.setenv("P2P_DTFM_HOME", str(tmp_path / "home"))
    code, out, _ = program("--config", config, "--threads", "3", "--show-config")
    assert code == 0
    lines = {line.split(" = ")[0].strip(): line for line in out.splitlines()}
    assert "= 3 " in lines["threads"] and "(flag)" in lines["threads"]
    assert "'cuda'" in lines["device"] and "(P2P_DTFM_DEVICE)" in lines["device"]
    assert "= 1.5 " in lines["memory_gib"] and f"({config})" in lines["memory_gib"]
    assert "= '' " in lines["run"] and "(default)" in lines["run"]
    assert "(P2P_DTFM_HOME)" in lines["home"]
    assert not (tmp_path / "home").exists(), "to show is not to do"


def test_a_list_in_the_environment_is_split_at_spaces(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2P_DTFM_LISTEN", "/ip4/127.0.0.1/tcp/1 /ip4/127.0.0.1/tcp/2")
    _, out, _ = program("--show-config")
    assert "['/ip4/127.0.0.1/tcp/1', '/ip4/127.0.0.1/tcp/2']" in out


def test_data_are_prepared_trained_on_and_written_from(tmp_path: Path, program: Program) -> None:
    text = tmp_path / "poem.txt"
    text.write_text("".join(f"{n} green bottles hanging on the wall\n" for n in range(2000)))
    out = tmp_path / "data"
    code, said, _ = program("prepare", text, "--out", out, "--context", "32")
    assert code == 0 and f'source = "{out}"' in said

    home = tmp_path / "home"
    spec = write_spec(tmp_path, total_steps=12, data={"source": str(out)})
    done = run_program(
        "--home", home, "--listen", "/ip4/127.0.0.1/tcp/0", "--run", spec, "--threads", "1",
        "--exit-when-done",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--initial-peers /ip4/127.0.0.1" in done.stdout
    lines = [json.loads(line) for line in done.stderr.splitlines()]  # stderr is not a terminal
    said = [re.match(r"([a-z]+): (.+)", line["message"]) for line in lines]
    states = [found[1] for found in said if found]
    order = [states.index(name) for name in ("measuring", "training", "done")]
    assert order == sorted(order), "each state once it begins, with its reason"

    def text_of(seed: int) -> str:
        code, written, _ = program(
            "generate", "--home", home, "--prompt", "3 green", "--tokens", "40", "--seed", str(seed)
        )
        assert code == 0 and written.startswith("3 green")
        return written

    assert text_of(1) == text_of(1) != text_of(2)
    assert_nothing_is_left(tmp_path)


def test_without_a_checkpoint_generate_says_so(tmp_path: Path, program: Program) -> None:
    code, _, err = program("generate", "--home", tmp_path)
    assert code == 2 and "no whole checkpoint" in err and "train first" in err
    code, _, err = program("export", "--home", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and "no whole checkpoint" in err and "generate" not in err


# with daemons -------------------------------------------------------------------------------------


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, ["--threads", "1"], MODULE) as found:
        yield found
    assert_nothing_is_left(tmp_path)


def test_one_home_has_one_daemon_and_signals_end_it(
    prepared_data: Path, tmp_path: Path, swarm: LocalSwarm, program: Program
) -> None:
    spec = write_spec(tmp_path, total_steps=1_000_000, data={"source": str(prepared_data)})
    founder, address = swarm.found(["--run", str(spec)])
    second = run_program("--home", founder.home, "--run", spec)
    assert second.returncode == 3
    assert str(founder.process.pid) in second.stderr and "p2p-dtfm status" in second.stderr

    wait_until(lambda: step_of(founder) > 2, "it trains")
    code, out, _ = program("status", "--home", founder.home)
    assert code == 0 and "training for" in out and address.rsplit("/", 1)[1] in out
    assert re.search(r"^  layers +0-5 computed$", out, re.MULTILINE)
    stands = r"^  agreement +in a view: nothing calls for another view$"
    assert re.search(stands, out, re.MULTILINE), out

    joiner = swarm.join(address)
    wait_until(lambda: len((joiner.status() or {}).get("members", ())) == 2, "both are members")
    wait_until(lambda: len((founder.status() or {}).get("members", ())) == 2, "both know it")
    told = (joiner.home / "stderr").read_text()
    notes = "data one module, licence PSF-2.0, source https://python.org"
    assert 0 < told.find(notes) < told.find("takes part in run"), "before it takes part"
    joiner.process.send_signal(signal.SIGSTOP)  # so that nobody agrees to the founder's leaving
    try:
        founder.process.send_signal(signal.SIGTERM)
        wait_until(lambda: state_of(founder)[0] == "leaving", "the first signal hands over")
        founder.process.send_signal(signal.SIGTERM)
        assert founder.process.wait(DEADLINE_S) == 130, "the second signal ends it at once"
        wait_until(lambda: not processes_of(founder.home), "its p2pd is gone")
    finally:
        joiner.process.send_signal(signal.SIGCONT)
        joiner.process.kill()


def test_a_daemon_that_starts_can_be_told_to_leave(
    prepared_data: Path, tmp_path: Path, swarm: LocalSwarm
) -> None:
    spec = write_spec(tmp_path, data={"source": str(prepared_data)})
    founder = swarm.start(["--run", str(spec)])
    wait_until(lambda: logged(founder, "(12D3KooW"), "it has begun to start")
    founder.process.send_signal(signal.SIGTERM)
    assert founder.process.wait(DEADLINE_S) == 0, founder.log_tail()
    assert not logged(founder, "Traceback")
