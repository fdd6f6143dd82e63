"""One command for several devices: each has a daemon, and the daemons begin, are shown and end as
one."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from p2p_dtfm.daemon.machine.local_client import ask_daemon, homes_here
from p2p_dtfm.web.guard import TOKEN_HEADER
from tests.e2e.helpers import run_program, wait_until, write_endless_spec


def state_of(home: Path) -> dict[str, Any]:
    return ask_daemon(home, "status") or {}


def train_together(home: Path) -> bool:
    said = [state_of(each) for each in homes_here(home)]
    members = {tuple(facts.get("members", ())) for facts in said}
    return (
        len(said) == 2
        and all(facts.get("step") for facts in said)
        and len(members) == 1
        and len(members.pop()) == 2
    )


class Command:
    """`p2p-dtfm` for two devices of one home, with its output in a file."""

    def __init__(self, home: Path, log: Path, *words: str) -> None:
        self.log = log
        common = ["--home", str(home), "--listen", "/ip4/127.0.0.1/tcp/0", "--log", "human"]
        command = [sys.executable, "-m", "p2p_dtfm", "--device", "cpu,cpu", *common, *words]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=file, start_new_session=True
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


def is_over(home: Path) -> bool:
    return all(ask_daemon(each, "status") is None for each in (home, home / "devices" / "2"))


@pytest.mark.nightly
def test_two_devices_train_pause_and_end_by_one_command(tmp_path: Path) -> None:
    home, spec = tmp_path / "home", write_endless_spec(tmp_path)
    with Command(home, tmp_path / "first", "--run", str(spec)) as first:
        wait_until(lambda: train_together(home), "both devices in one view, with steps")
        assert re.search(r"\[1 cpu\] \S+ agreed on view 1:.*, 2 members", first.said())
        assert "[2 cpu]" in first.said()
        shown = run_program("status", "--home", home)
        states = re.findall(r"^(?:training|spare|syncing) for ", shown.stdout, re.MULTILINE)
        assert len(states) == 2, shown.stdout  # a plan may do without one of the devices
        facts = json.loads(run_program("status", "--home", home, "--json").stdout)
        ids = {facts["peer_id"], facts["other_devices"][0]["peer_id"]}
        assert len(ids) == 2 and ids == set(facts["members"])
        for each in homes_here(home):
            told = lambda at=each: set(state_of(at).get("this_machine", ()))  # noqa: E731
            wait_until(lambda told=told: told() == ids, "each knows of the other")
        links = [record["links"] for record in ask_daemon(home, "peers") or ()]
        assert any(link["round_trip_ns"] > 0 for each in links for link in each.values())

        assert run_program("pause", "--home", home).returncode == 0
        wait_until(lambda: states_of(home) == {"paused"}, "both are paused")
        press(home, "resume")
        wait_until(lambda: train_together(home), "both are back in one view")
        press(home, "pause")
        wait_until(lambda: states_of(home) == {"paused"}, "both are paused by one page's button")
        assert run_program("resume", "--home", home).returncode == 0
        wait_until(lambda: train_together(home), "both are back in one view")

        os.kill(first.process.pid, signal.SIGINT)
        assert first.process.wait(60) == 0, first.said()
        assert is_over(home) and "Traceback" not in first.said()

    with Command(home, tmp_path / "second") as second:
        wait_until(lambda: train_together(home), "both take up the run that they had")
        os.kill(second.process.pid, signal.SIGKILL)
        wait_until(lambda: is_over(home), "neither stays when the command is killed", 60)


def press(home: Path, button: str) -> None:
    """Press a button on the page of the first device."""
    invitation = ask_daemon(home, "dashboard") or {}
    token = invitation["address_with_token"].split("#token=")[1]
    connection = http.client.HTTPConnection(urlsplit(invitation["address"]).netloc, timeout=20)
    with contextlib.closing(connection):
        connection.request("POST", f"/api/actions/{button}", headers={TOKEN_HEADER: token})
        assert connection.getresponse().status == 200


def states_of(home: Path) -> set[str]:
    return {state_of(each).get("state", "") for each in homes_here(home)}
