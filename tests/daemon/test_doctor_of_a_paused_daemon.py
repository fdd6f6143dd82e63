"""What the doctor takes from a daemon that runs and takes no part."""

import asyncio
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.records import Reachability
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.peers import doctor
from p2p_dtfm.daemon.peers.checks.check import Check, Grade
from p2p_dtfm.daemon.peers.doctor import Examination, examine
from p2p_dtfm.daemon.peers.facts.newcomer import within_limits
from tests.core.builders import run_spec

TOLD_BEFORE = {"reachability": "direct", "reason": "called back", "public_host": "192.0.2.7"}
"""A way in from before the pause. It is in the last status, which a paused daemon goes on
showing."""


class Unasked:
    """A reachability service that asks nobody, as its host reaches nobody."""

    def __init__(self, host: Any, relays: bool) -> None:
        """`host` reaches nobody."""

    async def ready(self) -> "Unasked":
        return self

    async def close(self) -> None: ...


class Alone:
    """A host that is connected to nobody."""

    async def connected_peers(self) -> tuple[str, ...]:
        return ()


def test_what_is_wrong_with_the_daemon_itself_is_told_with_its_fix(tmp_path: Path) -> None:
    """One that a full disk kept away was told to be "ok"."""
    reason = "cannot take part now: its disk is full; tries again in 5 minutes"
    away = {"what": "cannot take part now: its disk is full", "fix": "free space"}
    found = doctor.check_daemon(
        tmp_path, {"state": "paused", "reason": reason, "problems": [away, away, away]}
    )
    told = f"runs: paused, {reason}; 2 problems more: see p2p-dtfm status"
    assert found == Check("daemon", Grade.WARNING, told, "free space")
    late = {"what": "step 3 is late", "fix": "wait"}
    found = doctor.check_daemon(
        tmp_path, {"state": "training", "reason": "step 3 of 9", "problems": [late]}
    )
    assert found.found == "runs: training, step 3 of 9; step 3 is late"
    well: dict[str, object] = {"state": "training", "reason": "step 3 of 9", "problems": []}
    assert doctor.check_daemon(tmp_path, well).verdict is Grade.OK


@pytest.mark.parametrize("state", ["paused", "training"])
def test_a_port_and_a_way_that_it_had_before_its_pause_are_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Another program had taken the port, and the doctor said that the daemon has it. It also told
    who had reached that port before the pause."""
    status = {"state": state, "reason": "x", "peer_id": "me", "reachability": TOLD_BEFORE}
    found: list[Any] = []

    def asked(home: Path, name: str) -> Any:
        return status if name == "status" else []

    async def network(what: Examination, daemon: Any, add: Any) -> None:
        found.append(await doctor._finding(Alone(), what, daemon))  # type: ignore[arg-type]

    for name, stand_in in {
        "ask_daemon": asked,
        "check_devices": lambda *of: (),
        "examine_network": network,
        "ReachabilityService": Unasked,
    }.items():
        monkeypatch.setattr(doctor, name, stand_in)
    checks: list[Check] = []
    with socket.create_server(("127.0.0.1", 0)) as another:
        listen = (f"/ip4/127.0.0.1/tcp/{another.getsockname()[1]}",)
        machine = partial(within_limits, Settings())
        what = Examination(tmp_path, listen, (), (), "cpu", 1, run_spec(), machine)
        asyncio.run(examine(what, checks.append))
    (port,) = (check for check in checks if check.name == "port")
    if state == "paused":
        assert port.verdict is Grade.FAILED and "end the program" in port.fix
        assert found == [None]
    else:
        assert "by the daemon that runs" in port.found
        assert found[0].reachability is Reachability.DIRECT
