"""Limits hold on real daemons, and a pause hands over, frees memory and ends."""

import asyncio
import http.client
import json
import os
import re
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from p2p_dtfm.daemon.machine.disk import size_of
from p2p_dtfm.daemon.machine.local_client import ask_daemon, call_daemon
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.web.guard import TOKEN_HEADER
from tests.documentation.screens import check_screen
from tests.e2e.helpers import (
    DEADLINE_S,
    errors_of,
    losses,
    run_program,
    state_of,
    step_of,
    wait_until,
    write_spec,
)
from tests.e2e.walking_daemon import MODULE
from tests.net.test_ports import free_port

MIB = 1 << 20
PAUSED_LIMIT_BYTES = 120 * MIB


def busy_threads(process: psutil.Process, until: Callable[[], bool]) -> list[float]:
    """CPU seconds of each thread that computed until then, in falling order."""
    before = {thread.id: thread.user_time for thread in process.threads()}
    wait_until(until, "time to measure")
    spent = [thread.user_time - before.get(thread.id, 0.0) for thread in process.threads()]
    return sorted(spent, reverse=True)


class Dashboard:
    """What a page of this daemon asks, from the address that its user was given once."""

    def __init__(self, child: Child) -> None:
        invitation = ask_daemon(child.home, "dashboard")
        self._address = urlsplit(invitation["address"])
        self._token = invitation["address_with_token"].split("#token=")[1]

    def ask(self, action: str) -> None:
        assert self._request("POST", f"/api/actions/{action}", {}).status == 403
        reply = self._request("POST", f"/api/actions/{action}", {TOKEN_HEADER: self._token})
        assert reply.status == 200

    def state(self) -> dict:
        return json.loads(self._request("GET", "/api/state", {}).read())

    def offers(self) -> list[str]:
        """The actions on offer; none while one process takes the page over from another."""
        try:
            events = self._request("GET", "/api/events", {})
        except (OSError, http.client.HTTPException):
            return []
        while (line := events.readline()) != b"event: actions\n":
            if not line:
                return []
        return json.loads(events.readline().removeprefix(b"data: "))

    def _request(self, method: str, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._address.netloc, timeout=30)
        connection.request(method, path, headers=headers)
        return connection.getresponse()


def members(child: Child) -> int:
    return len((child.status() or {}).get("members", ()))


def steps_of_both(one: Child, other: Child) -> set[int]:
    return losses(one).keys() & losses(other).keys()


def test_limits_hold_and_a_pause_frees_memory_while_the_others_train_on(
    prepared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    spec = write_spec(
        tmp_path,
        total_steps=1_000_000,
        model={"layers": 4, "width": 192, "heads": 2, "context": 32, "vocabulary": 256},
        checkpoint={"every_steps": 4, "keep": 50},
        evaluation={"every_steps": 10_000, "sequences": 4},
        data={"source": str(prepared_data)},
    )
    limit_bytes = 100 * MIB  # a checkpoint takes 22 MiB
    limits = ["--threads", "1", "--disk-gib", str(limit_bytes / (1 << 30))]
    with LocalSwarm(tmp_path, module=MODULE) as swarm:
        # a port that no other daemon chooses while this one starts as a smaller process
        own_port = ["--dashboard", str(free_port())]
        founder, address = swarm.found(["--run", str(spec), *limits, *own_port])
        process = psutil.Process(founder.process.pid)
        wait_until(lambda: step_of(founder) >= 4, "it trains")
        computing, waiting, *others = busy_threads(process, lambda: step_of(founder) >= 30)
        assert computing > waiting, "the thread of torch, and that of the event loop"
        assert max(others) < 0.2 * computing, "and no other thread computes"

        checkpoints = next(founder.home.glob("runs/*/checkpoints"))
        wait_until(lambda: size_of(founder.home) <= limit_bytes, "the limit is kept")
        assert len(list(checkpoints.glob("step-*"))) >= 2
        wait_until(lambda: not any(checkpoints.glob("step-00000004")), "the oldest went first")

        joiner = swarm.join(address, ["--threads", "1"])
        wait_until(lambda: members(founder) == members(joiner) == 2, "both are members")
        page = Dashboard(founder)
        assert page.offers() == ["pause", "leave"]
        page.ask("pause")
        wait_until(lambda: state_of(founder)[0] == "paused", "it pauses")
        wait_until(lambda: page.offers() == ["resume", "leave"], "the same page is still served")
        assert page.state()["live"]["state"] == "paused" and page.state()["history"]["loss"]
        assert "p2p-dtfm resume" in state_of(founder)[1]
        assert not process.children(), "libp2p has ended"
        resident_bytes = process.memory_info().rss
        assert resident_bytes < PAUSED_LIMIT_BYTES, f"{resident_bytes / MIB:.0f} MiB"
        step = step_of(joiner)
        wait_until(lambda: step_of(joiner) > step + 3, "the other trains on, alone")

        page.ask("resume")
        wait_until(lambda: members(founder) == members(joiner) == 2, "it is back")
        assert page.offers() == ["pause", "leave"]
        assert any("paused" in event["text"] for event in page.state()["events"])
        wait_until(lambda: len(steps_of_both(founder, joiner)) >= 2, "they take steps together")
        for step in steps_of_both(founder, joiner):
            assert losses(founder)[step] == losses(joiner)[step], "with the same losses"
        assert founder.running


RESIDENT_GIB = 0.8


@pytest.mark.nightly
def test_the_whole_process_stays_under_its_memory_limit(
    prepared_data: Path, tmp_path: Path
) -> None:
    """Each of two peers may hold too little for the whole model, so each also guards the other's
    half. Checkpoints copy what they save. Peaks are the kernel's own figures."""
    spec = write_spec(
        tmp_path,
        total_steps=1_000_000,
        model={"layers": 6, "width": 256, "heads": 4, "context": 32, "vocabulary": 256},
        checkpoint={"every_steps": 3},
        evaluation={"every_steps": 10_000, "sequences": 4},
        data={"source": str(prepared_data)},
    )
    limits = ["--threads", "1", "--resident-gib", str(RESIDENT_GIB)]
    with LocalSwarm(tmp_path) as swarm:
        founder, address = swarm.found(["--run", str(spec), *limits])
        wait_until(lambda: state_of(founder)[0] == "waiting", "one alone has too little")
        assert "more memory is needed" in state_of(founder)[1]
        before_bytes = peak_bytes(founder)
        joiner = swarm.join(address, limits)
        wait_until(lambda: step_of(joiner) >= 7, "both train and save")
        for child in (founder, joiner):
            assert peak_bytes(child) < RESIDENT_GIB * (1 << 30)
        assert peak_bytes(founder) > before_bytes + 60 * MIB, "what is held is seen at all"


def peak_bytes(child: Child) -> int:
    """The highest resident sets ever of the daemon and of its p2pd, added up."""
    family = [psutil.Process(child.process.pid)]
    family += family[0].children(recursive=True)
    statuses = [Path(f"/proc/{member.pid}/status").read_text() for member in family]
    found = [re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE) for status in statuses]
    return sum(int(match[1]) << 10 for match in found if match)


@pytest.mark.nightly
def test_too_little_memory_for_the_program_itself_is_said_at_once(tmp_path: Path) -> None:
    arguments = ["--run", "tiny", "--resident-gib", "0.1"]
    done = run_program("--home", tmp_path, "--listen", "/ip4/127.0.0.1/tcp/0", *arguments)
    assert done.returncode == 2
    shown = re.sub(r"\d+\.\d+ GiB", "NUMBER GiB", errors_of(done))
    shown = re.sub(r"allow \d+\.\d+", "allow NUMBER", shown)
    check_screen("A memory limit below what the program takes", shown, tmp_path, arguments)


class Clock:
    """A time of day that the test sets."""

    def __init__(self, hour: int) -> None:
        self.hour = hour

    def __call__(self) -> datetime:
        return datetime(2026, 1, 1, self.hour, 30)


def test_it_takes_part_in_its_hours_only(
    prepared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = write_spec(tmp_path, total_steps=1_000_000, data={"source": str(prepared_data)})
    home = tmp_path / "home"
    settings = Settings(
        home=home, run=str(spec), hours="22-07", threads=1, listen=("/ip4/127.0.0.1/tcp/0",)
    )
    clock = Clock(12)
    seen: list[str] = []

    def live_through_a_day() -> None:
        def state() -> str:
            return (ask_daemon(home, "status") or {"state": ""})["state"]

        def step() -> int:
            return (ask_daemon(home, "status") or {}).get("step") or 0

        try:
            wait_until(lambda: state() == "paused", "at noon it waits")
            assert not list(home.glob("runs/*")), "and has done nothing yet"
            clock.hour = 22
            wait_until(lambda: step() > 3, "at night it trains")
            clock.hour = 7
            wait_until(lambda: state() == "paused", "in the morning it leaves")
            seen.append(ask_daemon(home, "status")["reason"])
            saved = [int(path.name.split("-")[1]) for path in home.glob("runs/*/checkpoints/*")]
            clock.hour = 23
            wait_until(lambda: state() == "training" and step() > max(saved), "it goes on")
            seen.append("went on")
        finally:
            end_s = time.monotonic() + DEADLINE_S
            while ask_daemon(home, "status") is None and time.monotonic() < end_s:
                time.sleep(0.05)
            call_daemon(home, "leave", "POST")

    day = threading.Thread(target=live_through_a_day)
    day.start()
    assert asyncio.run(Resident(settings, now=clock).run()) == 0
    day.join()
    assert seen == ["takes part in the hours 22:00-07:00 only", "went on"]
    assert not os.path.exists(home / "daemon.sock")
