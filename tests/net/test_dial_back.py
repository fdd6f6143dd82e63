"""Another peer says where it sees this one."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.nat.dial_back import CallBacks, SeenAddress


@pytest.mark.parametrize("port", [0, -1, 1 << 16, 1 << 60])
def test_a_port_that_there_is_not_is_refused(port: int) -> None:
    """Otherwise this peer would tell others to call it there, and they would refuse all that it
    asks."""

    async def scenario() -> None:
        async def call(*question: Any) -> bytes:
            return encode(SeenAddress("5.9.0.4", port, ()))

        host: Any = SimpleNamespace()
        calls = CallBacks(host)
        calls._control.call = call  # type: ignore[method-assign]
        with pytest.raises(PeerFault, match="where nobody can be"):
            await calls.ask("peer", (4001,))

    event_loop.run(scenario())
