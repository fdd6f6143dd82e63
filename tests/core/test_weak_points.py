"""Whose loss would cut the swarm, compared with networkx."""

import random

import networkx
import pytest

from p2p_dtfm.core.membership.weak_points import WeakPoints, weak_points
from p2p_dtfm.core.protocol.records import Link
from tests.core.builders import record


def records_of(pairs: set[tuple[int, int]], count: int):
    """Records in which only the first of each pair has measured the link."""
    return [
        record(
            f"p{at:02d}",
            links={f"p{b:02d}": Link(1, 1) for a, b in sorted(pairs) if a == at},
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_as_networkx_finds_them(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(3, 14)
    pairs = {
        (a, b)
        for a in range(count)
        for b in range(count)
        if a != b and chance.random() < chance.choice((0.08, 0.15, 0.3))
    }
    graph = networkx.Graph()
    graph.add_nodes_from(f"p{at:02d}" for at in range(count))
    graph.add_edges_from((f"p{a:02d}", f"p{b:02d}") for a, b in pairs)
    found = weak_points(records_of(pairs, count))
    assert found.peers == tuple(sorted(networkx.articulation_points(graph)))
    assert found.links == tuple(sorted(tuple(sorted(pair)) for pair in networkx.bridges(graph)))


def test_two_homes_that_one_peer_joins() -> None:
    inside = {(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5), (2, 3)}
    found = weak_points(records_of(inside, 6))
    assert found == WeakPoints(("p02", "p03"), (("p02", "p03"),))


def test_two_members_and_strangers_links_name_nothing() -> None:
    assert weak_points(records_of({(0, 1)}, 2)) == WeakPoints((), ())
    alone = [record(f"p{at}", links={"stranger": Link(1, 1)}) for at in range(3)]
    assert weak_points(alone) == WeakPoints((), ())
