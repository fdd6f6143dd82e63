"""A search that remembers costs finds what one finds that does not."""

import random

import pytest

from p2p_dtfm.core.planner import remembered_costs
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.snapshot import Snapshot
from tests.core.planning import Peer, snapshot, workload


def drawn(number: int) -> Snapshot:
    draws = random.Random(number)
    peers = [
        Peer(draws.randrange(1_000_000, 9_000_000), memory_bytes=draws.choice([1 << 28, 1 << 40]))
        for _ in range(3 + number)
    ]
    links = {
        (one, other): Link(draws.randrange(10**6, 4 * 10**7), draws.randrange(1 << 20, 1 << 27))
        for one in range(len(peers))
        for other in range(len(peers))
        if one != other
    }
    return snapshot(peers, workload(blocks=4, microbatches=4), links)


def test_plans_are_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = [drawn(number) for number in range(4)]
    found = [compute_plan(made) for made in snapshots]
    monkeypatch.setattr(remembered_costs, "MOST_PEERS", 0)
    assert [compute_plan(made) for made in snapshots] == found
