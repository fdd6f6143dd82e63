"""Our relay in p2pd's place, and calls back; circuits need routers: tests/nat has those."""

import asyncio
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.errors import Refused
from p2p_dtfm.net.nat.dial_back import CallBacks
from p2p_dtfm.net.nat.relay import Relay, reserve
from tests.net.net_support import hosts, run


def test_who_cannot_be_called_relays_for_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (middle, other):
            await Relay(middle, lambda: False).ready()
            with pytest.raises(Refused, match="permission denied"):
                await reserve(other, middle.peer_id)

    run(scenario())


def test_a_peer_is_called_back_where_it_is_and_nowhere_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (asked, asking):
            port = int((await asking.addresses())[0].split("/")[4])
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1")
            other = server.sockets[0].getsockname()[1]
            await CallBacks(asked).ready()
            callbacks = CallBacks(asking)
            seen = await callbacks.ask(asked.peer_id, (other, port))
            assert seen.open_ports == (port,), "only a libp2p peer counts"
            assert seen.host == "127.0.0.1"
            with pytest.raises((Refused, PeerFault)):
                await callbacks.ask(asked.peer_id, (0,))
            server.close()

    run(scenario())
