"""Another peer says where it sees this one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.gate.dialling import Dialling
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.nat.dial_back import _GREETING, CallBack, CallBacks, SeenAddress


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


def test_who_asks_over_a_connection_that_was_joined_here_is_not_called() -> None:
    """The far end of a punched connection is the loopback of the peer that joined it. That peer
    called its own port, which is mostly the asker's too. So the asker was told that others get
    through to 127.0.0.1, took that for a way in, and gave up its relays."""

    async def scenario() -> None:
        async def own_p2pd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(_GREETING)
            writer.close()

        async def joined_here(peer_id: str) -> str:
            return "/ip4/127.0.0.1/tcp/40001"

        async with await asyncio.start_server(own_p2pd, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            host: Any = SimpleNamespace(
                is_only_local=False,
                direct_address=joined_here,
                calling=SimpleNamespace(dialling=Dialling()),
            )
            with pytest.raises(PeerFault, match="joined to ours here"):
                await CallBacks(host)._answer("peer", encode(CallBack((port,))))

    event_loop.run(scenario())
