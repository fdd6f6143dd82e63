"""A bootstrap node brings people together, holds no torch, and a swarm outlives it."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.core.builders import run_spec
from tests.e2e.helpers import DEADLINE_S
from tests.e2e.test_daemons import alive, step_of, wait_until
from tests.forked import run_to_its_end

PUBLIC_PORT = 28744


@contextmanager
def bootstrap_node(
    home: Path,
    listen: str = "/ip4/127.0.0.1/tcp/0",
    more: Sequence[str] = (),
    errors: IO[str] | None = None,
) -> Iterator[tuple]:
    """The bootstrap node's process, and its address."""
    command = [sys.executable, "-m", "p2p_dtfm", "bootstrap", "--home", str(home), "--json"]
    command += ["--listen", listen, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["addresses"][0]
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
        process.stdout.close()


def write_spec(directory: Path) -> Path:
    """A run without an end, of steps long enough for a newcomer to catch up."""
    path = directory / "run.json"
    spec = run_spec(
        total_steps=100_000,
        model={"layers": 4, "width": 64, "heads": 2, "context": 64, "vocabulary": 256},
        batch={"global_batch": 32, "microbatch": 4},
        evaluation={"every_steps": 1000, "sequences": 4},
    )
    path.write_text(spec.model_dump_json())
    return path


def digest_from(founder: Child) -> str:
    lines = (founder.home / "stdout").read_text().splitlines()
    return next(line.rsplit(" ", 1)[1] for line in lines if "--run-digest" in line)


def members(child: Child) -> int:
    return len((child.status() or {}).get("members", ()))


@pytest.mark.nightly  # commands of docs/bootstrap.md are typed in each run, up to the node's end
def test_a_swarm_meets_at_a_bootstrap_node_and_outlives_it(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    with (
        bootstrap_node(tmp_path / "bootstrap") as (node, address),
        LocalSwarm(tmp_path, ["--threads", "1"]) as swarm,
    ):
        founder, own_address = swarm.found(["--run", str(spec), "--initial-peers", address])
        digest = digest_from(founder)
        assert len(digest) == 64
        # the founder may still be measuring: it waits until the founder is present
        second = swarm.join(address, ["--run-digest", digest])
        wait_until(lambda: members(founder) == members(second) == 2, "two train together")
        node.terminate()
        assert node.wait(DEADLINE_S) == 0
        third = swarm.join(own_address)
        wait_until(lambda: members(third) == 3, "a newcomer joins without the bootstrap node")
        before = step_of(third)
        wait_until(lambda: step_of(third) > before + 3, "and they train on")


@pytest.mark.nightly
def test_a_node_that_was_started_again_shows_a_run_to_everybody(tmp_path: Path) -> None:
    """The owner of the node does it so: the run's digest is known only once the run is founded
    through the node."""
    with LocalSwarm(tmp_path, ["--threads", "1", "--dashboard", "off"]) as swarm:
        with bootstrap_node(tmp_path / "bootstrap") as (_, address):
            run = ["--run", str(write_spec(tmp_path)), "--initial-peers", address]
            founder, _ = swarm.found([*run, "--tell-status", "--name", "Ada"])
        digest = digest_from(founder)
        page = ["--public-status", str(PUBLIC_PORT), "--run-digest", digest]
        at = address.partition("/p2p/")[0]
        with bootstrap_node(tmp_path / "bootstrap", at, page):
            assert status_at(PUBLIC_PORT)["state"] == "nobody answers"
            wait_until(lambda: status_at(PUBLIC_PORT)["step"] > 0, "the member tells of its run")
            told = status_at(PUBLIC_PORT)
            assert told["run"] == "test" and told["losses"] and told["peers"] == 1
            assert told["join_line"] == f"p2p-dtfm --initial-peers {address} --run-digest {digest}"
            with urllib.request.urlopen(f"http://127.0.0.1:{PUBLIC_PORT}/", timeout=10) as reply:
                html = reply.read()
            assert b"<svg" in html and b"Ada" not in html
            assert founder.home.name not in html.decode()
            founder.process.kill()
            before = status_at(PUBLIC_PORT)["step"]
            wait_until(lambda: status_at(PUBLIC_PORT)["state"] == "nobody answers", "it says so")
            assert status_at(PUBLIC_PORT)["step"] >= before, "and shows what it knows"


def status_at(port: int) -> dict[str, Any]:
    time.sleep(1.2)  # an address gets an answer a second
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=10) as reply:
        found: dict[str, Any] = json.load(reply)
    return found


@pytest.mark.nightly
def test_who_brings_a_run_that_is_trained_already_joins_it(tmp_path: Path) -> None:
    run = ["--run", str(write_spec(tmp_path))]
    with (
        bootstrap_node(tmp_path / "bootstrap") as (_, address),
        LocalSwarm(tmp_path, ["--threads", "1"]) as swarm,
    ):
        founder, _ = swarm.found([*run, "--initial-peers", address])
        wait_until(lambda: step_of(founder) >= 0, "the founder trains")
        swarm.join(address, run)
        wait_until(lambda: members(founder) == 2, "the same command joins")


def test_without_a_digest_the_error_says_what_is_missing(tmp_path: Path) -> None:
    with bootstrap_node(tmp_path / "bootstrap") as (_, address):
        arguments = ["--home", str(tmp_path / "peer"), "--listen", "/ip4/127.0.0.1/tcp/0"]
        done = run_to_its_end([*arguments, "--initial-peers", address], DEADLINE_S)
    assert done.returncode == 6
    assert "bootstrap node and trains nothing" in done.stderr
    assert "--run-digest" in done.stderr
    assert "Traceback" not in done.stderr


def test_its_address_stays_the_same(tmp_path: Path) -> None:
    with bootstrap_node(tmp_path / "bootstrap") as (_, first):
        pass
    port = first.split("/")[4]
    with bootstrap_node(tmp_path / "bootstrap", f"/ip4/127.0.0.1/tcp/{port}") as (_, second):
        assert first == second


def test_it_loads_no_torch_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with bootstrap_node(tmp_path / "bootstrap") as (process, _):
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "libtorch" not in maps and "numpy" not in maps
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("p2pd" in member.name() for member in family)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
        wait_until(lambda: not any(map(alive, family)), "p2pd is gone", deadline_s=2.0)


def test_a_second_signal_ends_it_at_once_and_without_pages_about_it(tmp_path: Path) -> None:
    """It ended with three tracebacks, one within the other."""
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        bootstrap_node(tmp_path / "bootstrap", errors=errors) as (node, _),
    ):
        family = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGINT)
        node.send_signal(signal.SIGTERM)
        assert node.wait(DEADLINE_S) == 130
        wait_until(lambda: not any(map(alive, family)), "p2pd is gone", deadline_s=2.0)
    told = log.read_text()
    assert "ends at once" in told and "Traceback" not in told


def test_a_second_one_in_the_same_home_is_refused(tmp_path: Path) -> None:
    with bootstrap_node(tmp_path / "bootstrap"):
        command = [sys.executable, "-m", "p2p_dtfm", "bootstrap", "--home"]
        command += [str(tmp_path / "bootstrap"), "--listen", "/ip4/127.0.0.1/tcp/0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 3
    assert "already running" in done.stderr


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    for process in psutil.process_iter(["cmdline"]):
        assert str(tmp_path) not in " ".join(process.info["cmdline"] or ())
