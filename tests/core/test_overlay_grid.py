"""The overlay of a swarm of many: everyone hears of everything once, over few connections."""

import msgspec
import pytest

from p2p_dtfm.core.consensus.overlay.grid import (
    Grid,
    grid_in_order,
    hosts_of,
    near_grid,
    usual_size,
)
from p2p_dtfm.core.protocol.records import Link, PeerRecord
from tests.core.builders import record

NEAR_NS, FAR_NS = 2_000_000, 200_000_000


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"peer-{n:04}" for n in range(count))


def _heard(grid: Grid, origin: str, lost: set[str]) -> list[str]:
    """Each peer that is told, as often as it is: the news goes across, then along the rows."""
    told = list(grid.row_mates(origin))
    for other in grid.across(origin, lost):
        told += [other, *grid.row_mates(other)]
    return [peer for peer in told if peer not in lost]


@pytest.mark.parametrize("count", [2, 3, 65, 100, 257])
def test_each_hears_once_of_what_anybody_says(count: int) -> None:
    grid = grid_in_order(_names(count))
    for origin in grid.places:
        assert sorted(_heard(grid, origin, set())) == sorted(set(grid.places) - {origin})


def test_the_next_in_its_row_stands_for_who_is_lost() -> None:
    grid = grid_in_order(_names(100))
    origin, lost = grid.rows[0][3], {grid.rows[4][3], grid.rows[4][4], grid.rows[7][3]}
    assert sorted(_heard(grid, origin, lost)) == sorted(set(grid.places) - {origin} - lost)


def test_the_degree_grows_with_the_square_root() -> None:
    for count in (64, 256, 1024):
        grid = grid_in_order(_names(count))
        most = max(len(grid.neighbours(peer)) for peer in grid.places)
        assert most <= 2 * usual_size(count)


def test_neighbours_are_mutual() -> None:
    grid = grid_in_order(_names(90), (30, 7, 23, 30))
    for peer in grid.places:
        for other in grid.neighbours(peer):
            assert peer in grid.neighbours(other)


def test_sizes_that_make_no_sense_are_not_followed() -> None:
    assert grid_in_order(_names(10), (4, 0, 6)) == grid_in_order(_names(10))
    assert grid_in_order(_names(10), (4, 5)) == grid_in_order(_names(10))


def _in_regions(count: int, regions: int) -> list[PeerRecord]:
    names = _names(count)
    return [
        msgspec.structs.replace(
            record(name),
            links={
                other: Link(NEAR_NS if n % regions == m % regions else FAR_NS, 1_000_000)
                for m, other in enumerate(names)
                if other != name
            },
        )
        for n, name in enumerate(names)
    ]


def test_who_is_near_stands_in_one_row() -> None:
    records = _in_regions(96, 8)
    grid = near_grid(records)
    assert sorted(grid.places) == [each.peer_id for each in records]
    for row in grid.rows:
        assert len({int(peer[5:]) % 8 for peer in row}) == 1
    assert grid == near_grid(list(reversed(records)))


def test_a_newcomer_is_spoken_for_by_who_is_near() -> None:
    records = _in_regions(96, 8)
    grid = near_grid(records[1:])
    hosts = hosts_of(records[0].peer_id, records[0], grid)
    assert len(set(hosts)) == len(hosts) > 1
    assert all(int(peer[5:]) % 8 == 0 for peer in hosts[:2])
    assert hosts_of("somebody", None, grid) == hosts_of("somebody", None, grid)
