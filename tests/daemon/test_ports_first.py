"""A port that is taken is told before anything is started."""

import asyncio
import socket
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node import daemon as daemons
from p2p_dtfm.daemon.node.daemon import Daemon


@pytest.mark.parametrize("setting", ["dashboard", "public_status"])
def test_a_taken_port_is_told_before_p2pd_starts(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal came after p2pd's start, and the user had waited for nothing."""

    async def start(*_: object) -> None:
        raise AssertionError("it has begun")

    monkeypatch.setattr(daemons.Network, "start", start)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        given = {"home": tmp_path / "home", "run": "tiny", "dashboard": "off", setting: port}
        with pytest.raises(UserError, match=f"cannot listen on .*{port}"):
            asyncio.run(Daemon(Settings(**given), DashboardHost()).run())
