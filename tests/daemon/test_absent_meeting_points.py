"""Initial peers that are away as a daemon starts are where others look for the run later."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from p2p_dtfm.daemon.node.network import CALLED_LIMIT
from p2p_dtfm.daemon.peers.recall import Past
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
