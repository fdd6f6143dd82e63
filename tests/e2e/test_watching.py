"""Real daemons as they are watched: from a browser's side, a terminal, Prometheus, Perfetto and
TensorBoard."""

import contextlib
import http.client
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from p2p_dtfm.core.protocol.names import generated_name
from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.web.guard import TOKEN_HEADER
from tests.daemon.test_event_files import figures
from tests.e2e.helpers import (
    assert_nothing_is_left,
    losses,
    run_program,
    step_of,
    wait_until,
    write_spec,
)
from tests.e2e.walking_daemon import MODULE

ROOT = Path(__file__).parents[2]
HALF_THE_MODEL_GIB = "0.0049"
COUNT = 2
BOARD = "board"
PUBLIC_PORT = 28743


@pytest.fixture
def swarm(prepared_data: Path, tmp_path: Path) -> Iterator[LocalSwarm]:
    """Two daemons, each with memory for half of the model: a pipeline of two stages."""
    spec = write_spec(
        tmp_path,
        total_steps=1_000_000,
        model={"layers": 4, "width": 64, "heads": 2, "context": 32, "vocabulary": 256},
        data={"source": str(prepared_data)},
    )
    half = ["--memory-gib", HALF_THE_MODEL_GIB]
    with LocalSwarm(tmp_path, ["--threads", "1", *half], MODULE) as found:
        public = ["--public-status", str(PUBLIC_PORT)]
        founder, address = found.found(["--run", str(spec), "--expect-peers", str(COUNT), *public])
        found.join(address, ["--tensorboard", str(tmp_path / BOARD), "--name", "<b>Ada</b>"])
        wait_until(lambda: step_of(founder) > 5, "it trains")
        yield found
    assert_nothing_is_left(tmp_path)


def asked(address: str, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.read()


def state_of(address: str) -> dict:
    status, body = asked(address, "/api/state")
    assert status == 200
    return json.loads(body)


def test_a_swarm_is_watched_and_left(swarm: LocalSwarm, tmp_path: Path) -> None:
    founder, joiner = swarm.children
    invitation = ask_daemon(joiner.home, "dashboard")
    address = invitation["address"]
    assert (joiner.status() or {})["dashboard"] == address
    assert address != ask_daemon(founder.home, "dashboard")["address"], "each has a port"

    wait_until(lambda: state_of(address)["view"]["number"] is not None, "the view is shown")
    state = state_of(address)
    assert state["live"]["state"] == "training" and state["run"]["name"] == "test"
    assert len(state["view"]["peers"]) == COUNT and len(state["view"]["pipelines"]) == 1
    me = state["view"]["peers"][state["view"]["me"]]
    assert me["peer_id"] == state["live"]["peer_id"] == (joiner.status() or {})["peer_id"]
    seen = state_of(ask_daemon(founder.home, "dashboard")["address"])
    others = [peer for peer in seen["view"]["peers"] if peer["peer_id"] == me["peer_id"]]
    assert [peer["name"] for peer in others] == [me["name"]] == ["<b>Ada</b>"], "as it is called"
    assert seen["live"]["name"] == generated_name(seen["live"]["peer_id"])
    assert state["history"]["loss"] and state["view"]["part"]["share"] > 0

    status, metrics = asked(address, "/metrics")
    step = re.search(rb"^p2p_dtfm_step ([0-9.]+)$", metrics, re.MULTILINE)
    assert status == 200 and step and float(step[1]) > 5

    check_public_page(founder)
    check_timeline(address)
    check_documented_commands(founder, tmp_path)

    token = invitation["address_with_token"].split("#token=")[1]
    assert token not in (joiner.home / "stderr").read_text()
    assert asked(address, "/api/actions/leave", "POST")[0] == 403
    assert asked(address, "/api/actions/leave", "POST", **{TOKEN_HEADER: token})[0] == 200
    assert joiner.process.wait(60) == 0, joiner.log_tail()
    check_board(joiner, tmp_path / BOARD)


def check_board(child: Child, directory: Path) -> None:
    """TensorBoard's files of a daemon that has ended hold each of its losses, and the others'."""
    read = figures(directory)
    shown = {step: value for step, name, value in read if name == "loss"}
    assert len(shown) > 5 and shown == losses(child)
    names = {name for _, name, _ in read}
    assert names == {"loss", "held_out_loss", "gradient_norm", "tokens_per_s"}


def check_public_page(founder: Child) -> None:
    """The page is where the log says, for anybody to read: it has what was reached, and nobody's
    name."""
    assert re.search(
        rf"anybody may read: http://\S+:{PUBLIC_PORT}/", (founder.home / "stderr").read_text()
    )
    page = f"http://127.0.0.1:{PUBLIC_PORT}/"
    status, facts = asked(page, "/status.json")
    assert status == 200 and json.loads(facts)["step"] > 5
    status, html = asked(page, "/")
    assert status == 200 and b"Ada" not in html and b"<svg" in html


def check_timeline(address: str) -> None:
    """The timeline is asked for while a page is open: here, while the events are read."""
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/api/events")
        events = connection.getresponse()
        wait_until(lambda: len(json.loads(next_timeline(events))["lanes"]) == COUNT, "bars of both")


def next_timeline(events: http.client.HTTPResponse) -> bytes:
    while events.readline() != b"event: timeline\n":
        pass
    return events.readline().removeprefix(b"data: ")


def check_documented_commands(child: Child, tmp_path: Path) -> None:
    """Each command of docs/dashboard.md, as it stands there."""
    page = (ROOT / "docs" / "dashboard.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = [line.split()[1:] for block in blocks for line in block.splitlines()]
    assert [words[0] for words in commands] == ["dashboard", "trace"]
    shown = run_program(*commands[0], P2P_DTFM_HOME=str(child.home))
    assert shown.returncode == 0
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{32,}\n", shown.stdout)

    out = tmp_path / "steps.json"
    traced = run_program(*commands[1][:-1], out, P2P_DTFM_HOME=str(child.home))
    assert traced.returncode == 0, traced.stderr
    assert re.match(r"steps \d+ to \d+ of 2 peers in ", traced.stdout)
    check_trace(json.loads(out.read_text()))


def check_trace(trace: dict) -> None:
    """By its clock, a microbatch enters the second stage after the first one has computed it."""
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len({event["args"]["step"] for event in spans}) == 3
    assert {event["tid"] for event in spans} == set(range(COUNT))
    forwards = {
        (event["args"]["step"], event["name"], event["tid"]): event
        for event in spans
        if event["cat"] == "forward"
    }
    pairs = [(forwards[step, name, 0], event) for (step, name, at), event in forwards.items() if at]
    assert pairs
    tolerance_us = 5_000  # these clocks were compared while the machine was busy
    assert all(one["ts"] + one["dur"] < other["ts"] + tolerance_us for one, other in pairs)


def test_a_terminal_shows_the_state_below_the_log(prepared_data: Path, tmp_path: Path) -> None:
    spec = write_spec(tmp_path, total_steps=1_000_000, data={"source": str(prepared_data)})
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "p2p_dtfm", "--home", str(tmp_path / "home")]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1", "--run", str(spec)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(theirs)
    screen = Screen(ours)
    try:
        wait_until(lambda: "others join with" in screen.text(), "what is printed stands above")
        wait_until(lambda: re.search(r"training for .* step \d+ of", screen.text()), "the state")
        wait_until(lambda: re.search(r"loss \d\.\d+ .*tokens/s", screen.text()), "the figures")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: "left the swarm" in screen.text(), "it leaves")
        # a terminal that nobody reads would stop the program
        wait_until(lambda: bool(screen.text()) and process.poll() is not None, "it ends")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        text = screen.text()
        os.close(ours)
    assert "Traceback" not in text
    assert '{"time_s"' not in text, "people do not read JSON"
    hidden, shown = screen.raw.rfind(b"\x1b[?25l"), screen.raw.rfind(b"\x1b[?25h")
    assert shown > hidden, "the cursor is visible"


class Screen:
    """What a program wrote to its terminal so far."""

    def __init__(self, descriptor: int) -> None:
        self.raw = b""
        self._descriptor = descriptor

    def text(self) -> str:
        """The screen's text without the control sequences."""
        end_s = time.monotonic() + 1.0
        while select.select([self._descriptor], [], [], 0)[0] and time.monotonic() < end_s:
            try:
                self.raw += os.read(self._descriptor, 1 << 16)
            except OSError:  # the program has ended
                break
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw.decode(errors="replace"))
