"""The dashboard's port stays its own while one program takes the place of another for a pause."""

import asyncio
import http.client
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.web.server import loopback_listener


def test_nobody_takes_it_in_between_and_who_asks_then_is_answered(tmp_path: Path) -> None:
    async def scenario() -> int:
        first, second = DashboardHost(), DashboardHost()
        await first.start("auto", tmp_path)
        port, listener = first.port, first.hand_over()
        assert port is not None and listener is not None
        await first.close()
        with pytest.raises(UserError, match="cannot listen"):
            loopback_listener(port).close()
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        await asyncio.to_thread(asked.request, "GET", "/")
        await second.start("auto", tmp_path, port, listener)
        try:
            assert second.port == port
            answer = await asyncio.to_thread(asked.getresponse)
            return answer.status
        finally:
            asked.close()
            await second.close()

    assert asyncio.run(scenario()) == 200
