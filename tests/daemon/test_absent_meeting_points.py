"""Initial peers that are away as a daemon starts are where others look for the run later."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import NOT_INVITED
from p2p_dtfm.daemon.node.network import CALLED_LIMIT, Network
from p2p_dtfm.daemon.peers.recall import Past
from p2p_dtfm.net.errors import Unreachable
from tests.daemon.test_coming_back_parts import acquaintances_of, network_of
from tests.daemon.test_memory import memory_of, peer_ids


def test_initial_peers_that_were_not_reached_are_called_again(tmp_path: Path) -> None:
    """Only those that answered in that moment were, and of a daemon without arguments none."""
    ids = peer_ids(tmp_path, 3)
    points = [f"/ip4/192.0.2.7/tcp/4001/p2p/{peer_id}" for peer_id in ids]
    memory = msgspec.structs.replace(memory_of(tmp_path), meeting_points=tuple(points[1:]))
    run: Any = SimpleNamespace(digest=memory.run_digest, signed_spec=memory.signed_spec)
    network = network_of()
    network.first_contacts = ()
    past = Past([memory], memory)
    for given, called in (
        ((), points[1:]),
        ((points[0], points[1]), points),
        (tuple(f"/ip4/192.0.2.7/tcp/{port}/p2p/{ids[0]}" for port in range(1, 99)), None),
    ):
        called_at: list[str] = []
        known: Any = acquaintances_of(tmp_path, network, past, initial_peers=given)
        known.directory = SimpleNamespace(call_again_at=called_at.extend)
        asyncio.run(known.begin_to_remember(run))
        assert called_at == called or (called is None and len(called_at) == CALLED_LIMIT)


async def _not_invited(peer_id: str) -> None:
    raise PeerFault(f"{NOT_INVITED}: this run is by invitation", peer_id)


async def _silent(peer_id: str) -> None:
    raise Unreachable(peer_id, "no answer within 3 s")


async def _lets_in(peer_id: str) -> None: ...


def test_one_that_trains_another_run_by_invitation_says_nothing_of_this_one(tmp_path: Path) -> None:
    """A service that was told so never tried again."""
    ids = peer_ids(tmp_path, 2)
    network = network_of()
    network.first_contacts = tuple(f"/ip4/192.0.2.7/tcp/1/p2p/{peer_id}" for peer_id in ids)
    reason = UserError("could not join the directory through ADDRESS: CAUSE", "x", exit_code=6)
    for answers, exit_code in (
        ((_not_invited, _not_invited), 5),
        ((_not_invited, _silent), 6),
        ((_not_invited, _lets_in), 6),
    ):
        said = dict(zip(ids, answers, strict=True))
        network.messenger.ask = lambda peer_id, hello, limit_s, said=said: said[peer_id](peer_id)
        why = asyncio.run(Network.why_turned_away(network, reason))
        assert why.exit_code == exit_code
    network.first_contacts = ()
    assert asyncio.run(Network.why_turned_away(network, reason)) is reason
