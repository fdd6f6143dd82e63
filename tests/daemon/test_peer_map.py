"""The map of peers: near in round trip means near on the map, and the map stays as it was."""

import math

import msgspec
import pytest

from p2p_dtfm.core.protocol.records import Link, PeerRecord
from p2p_dtfm.daemon.dashboard.peer_map import Points, place_peers
from tests.core.builders import record

MS = 1_000_000


def city_records(cities: dict[str, int], between_ms: int, within_ms: int = 2) -> list[PeerRecord]:
    names = [f"{city}-{number}" for city, count in cities.items() for number in range(count)]

    def link(one: str, other: str) -> Link:
        same = one.split("-")[0] == other.split("-")[0]
        return Link((within_ms if same else between_ms) * MS, 1_000_000)

    return [
        record(one, links={other: link(one, other) for other in names if other != one})
        for one in sorted(names)
    ]


def apart(points: Points, one: str, other: str) -> float:
    return math.dist(points[one], points[other])


def test_peers_of_a_city_lie_together_and_cities_apart() -> None:
    points = place_peers(city_records({"ams": 4, "nyc": 4, "tyo": 4}, between_ms=150))
    within = max(
        apart(points, f"{city}-{a}", f"{city}-{b}")
        for city in ("ams", "nyc", "tyo") for a in range(4) for b in range(a)
    )  # fmt: skip
    between = min(apart(points, "ams-0", "nyc-0"), apart(points, "nyc-0", "tyo-0"))
    assert between > 3 * within
    assert all(0 <= value <= 1 for point in points.values() for value in point)
    assert len(set(points.values())) == 12, "no two on one spot"


def test_the_map_stays_when_peers_come_and_go() -> None:
    before = place_peers(city_records({"ams": 3, "nyc": 3, "tyo": 2}, between_ms=100))
    later = city_records({"ams": 3, "nyc": 2, "tyo": 3}, between_ms=100)
    after = place_peers(later, before)
    stayed = before.keys() & after.keys()
    assert len(stayed) == 7
    assert max(math.dist(before[name], after[name]) for name in stayed) < 0.25
    left_to_right = sorted(stayed, key=lambda name: before[name][0])
    assert before[left_to_right[0]][0] < 0.5 < before[left_to_right[-1]][0]


@pytest.mark.parametrize("told_ns", [0, 1 << 59])
def test_who_says_that_all_are_near_or_far_moves_nobody_else(told_ns: int) -> None:
    """A peer that stated no distance at all to each other peer drew all others to one spot, on each
    member's page."""
    honest = city_records({"ams": 4, "nyc": 4, "tyo": 4}, between_ms=150)
    measured = [
        msgspec.structs.replace(it, links={**it.links, "zoe": Link(150 * MS, 1)}) for it in honest
    ]
    links = {it.peer_id: Link(told_ns, 1) for it in honest}
    points = place_peers([*measured, record("zoe", links=links)])
    within = max(
        apart(points, f"{city}-{a}", f"{city}-{b}")
        for city in ("ams", "nyc", "tyo") for a in range(4) for b in range(a)
    )  # fmt: skip
    between = min(apart(points, "ams-0", "nyc-0"), apart(points, "nyc-0", "tyo-0"))
    assert between > 3 * within and between > 0.25


def test_unmeasured_pairs_are_placed_by_the_way_through_others() -> None:
    """In a chain only neighbours have measured each other."""
    names = ["a", "b", "c"]
    records = [
        record("a", links={"b": Link(10 * MS, 1)}),
        record("b", links={}),
        record("c", links={"b": Link(10 * MS, 1)}),
    ]
    points = place_peers(records)
    assert apart(points, "a", "c") > 1.2 * apart(points, "a", "b")
    assert sorted(points) == names


def test_few_peers_and_no_measurements_make_a_map_too() -> None:
    assert place_peers([]) == {}
    assert place_peers([record("a")]) == {"a": (0.5, 0.5)}
    two = place_peers([record("a"), record("b")])
    assert apart(two, "a", "b") > 0.9
    alike = place_peers([record(name) for name in "abcdef"])
    assert all(math.isfinite(value) for point in alike.values() for value in point)
