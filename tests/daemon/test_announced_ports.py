"""A port that others are told, as a router's, need not be the one at which a daemon listens."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.daemon.peers.reachability import ReachabilityService
from p2p_dtfm.daemon.peers.recall import Past
from tests.daemon.test_coming_back_parts import acquaintances_of, network_of

ANNOUNCED = ("/ip4/5.9.0.4/tcp/40000",)
AT_31330 = ("/ip4/0.0.0.0/tcp/31330",)
ANYWHERE = ("/ip4/0.0.0.0/tcp/0",)


class Host:
    """p2pd tells what it is to announce, and nothing else."""

    peer_id = "me"
    is_only_local = False
    shaper = None
    found_addresses: tuple[str, ...] = ()

    async def addresses(self) -> tuple[str, ...]:
        return ANNOUNCED


@pytest.mark.parametrize(
    ("listen", "announce", "answered"),
    [
        (AT_31330, ANNOUNCED, [31330]),
        (("/ip4/0.0.0.0/udp/31331/quic-v1", *AT_31330), ANNOUNCED, [31330]),
        (ANYWHERE, ANNOUNCED, []),
        (ANYWHERE, (), [40000]),
    ],
)
def test_neighbours_are_told_the_port_at_which_somebody_listens(
    tmp_path: Path, listen: tuple[str, ...], announce: tuple[str, ...], answered: list[int]
) -> None:
    told: list[int] = []

    async def answer(run_digest: str, port: int, *_: Any, only_known: bool) -> None:
        told.append(port)

    network = network_of()
    network.host = Host()
    settings = {"listen": listen, "announce": announce}
    known: Any = acquaintances_of(tmp_path, network, Past([], None), **settings)
    known._nearby = SimpleNamespace(answer=answer)
    asyncio.run(known._answer_nearby("digest", only_known=False))
    assert told == answered


def test_a_direct_connection_is_joined_to_the_port_at_which_p2pd_listens() -> None:
    host: Any = Host()
    service = ReachabilityService(host, listen=AT_31330, announce=ANNOUNCED)
    asyncio.run(service._note_ports())
    assert service._punching._listen_port() == 31330
    assert service._ports == (40000,), "others call where it is announced"
