"""How many connections strangers may have this peer hold, each for as long as they like."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.nat.punching import BRIDGES_LIMIT, CallMe, Punching


def test_strangers_leave_members_room_for_direct_connections() -> None:
    """Sixty-four keys of one stranger could keep every member behind the relay."""

    async def filled() -> None:
        async def relayed(peer_id: str) -> None:
            return None

        host: Any = SimpleNamespace(
            peer_id="me",
            door=SimpleNamespace(is_near=lambda sender: sender.startswith("member")),
            calling=SimpleNamespace(trusts=lambda sender: True),
            direct_address=relayed,
        )
        punching = Punching(host, lambda: ("1.1.1.1", 4001), lambda: True, lambda: 4001)
        stays: Any = lambda request: asyncio.sleep(3600)  # noqa: E731
        punching._open_and_bridge = stays  # type: ignore[method-assign]
        asks = encode(CallMe("1.1.1.1", 4001, False))
        for number in range(BRIDGES_LIMIT // 2):
            await punching._answer(f"stranger-{number}", asks)
        with pytest.raises(PeerFault, match="busy"):
            await punching._answer("one more", asks)
        for number in range(BRIDGES_LIMIT // 2):
            await punching._answer(f"member-{number}", asks)
        with pytest.raises(PeerFault, match="busy"):
            await punching._answer("member too many", asks)
        for task in punching._tasks.values():
            task.cancel()

    event_loop.run(filled())


def test_a_peer_that_others_can_call_over_ipv6_is_called_there() -> None:
    """It was called at no address at all, after the connection through the relay had been cut."""

    async def scenario() -> list[str]:
        called: list[str] = []

        async def relayed(peer_id: str) -> None:
            return None

        async def disconnect(peer_id: str) -> None:
            called.append("cut")

        async def connect(peer_id: str, addresses: list[str], *how: Any, is_chosen: bool) -> None:
            called.extend(addresses)

        host: Any = SimpleNamespace(
            peer_id="me",
            door=SimpleNamespace(is_near=lambda sender: True),
            calling=SimpleNamespace(trusts=lambda sender: True),
            direct_address=relayed,
            disconnect=disconnect,
            connect=connect,
        )
        punching = Punching(host, lambda: ("1.1.1.1", 4001), lambda: False, lambda: 4001)
        await punching._answer("open", encode(CallMe("2606:4700::1111", 4001, True)))
        await asyncio.gather(*punching._tasks.values())
        with pytest.raises(PeerFault, match="IPv4"):
            await punching._answer(
                "behind a firewall", encode(CallMe("2606:4700::1112", 4001, False))
            )
        ours = Punching(host, lambda: ("2606:4700::1113", 4001), lambda: False, lambda: 4001)
        with pytest.raises(PeerFault, match="IPv4"):
            await ours._answer("behind a router", encode(CallMe("1.1.1.2", 4001, False)))
        return called

    assert event_loop.run(scenario()) == ["cut", "/ip6/2606:4700::1111/tcp/4001"]
