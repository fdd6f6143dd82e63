"""Seeds in which daemons go the rarer of two ways, and what a seed tells of that."""

from dataclasses import replace

from p2p_dtfm.ports.rarely import POINTS
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import QUICK, RARER, RARER_LIES
from p2p_dtfm.testbed.virtual.seeds.surroundings.rarer import LINGERS_S, OFTEN, RarerWays

TIMES = 2000


def test_from_930000_on_are_the_schedules_of_those_from_500000_on() -> None:
    for place in range(32):
        plain, rarer = draw(QUICK + place), draw(RARER + place)
        assert rarer.goes_rarer_ways and not plain.goes_rarer_ways
        assert replace(rarer, goes_rarer_ways=False, faults=()) == replace(plain, faults=())
        assert {it.kind for it in rarer.faults} == {it.kind for it in plain.faults}


def test_from_935000_on_some_lie_beside_them() -> None:
    schedules = [draw(seed) for seed in range(RARER_LIES, RARER_LIES + 20)]
    assert all(it.liars and it.is_audited and it.goes_rarer_ways for it in schedules)
    assert {it.is_small for it in schedules} == {False, True}


def test_of_each_seed_some_points_are_live_and_over_many_all_are() -> None:
    taken = []
    for seed in range(RARER, RARER + 40):
        rarer = RarerWays(seed)
        for point in POINTS:
            for _ in range(TIMES // 20):
                rarer.happens(point)
        taken.append({point for point in POINTS if rarer.taken[point]})
    assert set.union(*taken) == set(POINTS)
    assert all(0 < len(it) < len(POINTS) for it in taken)


def test_a_live_point_is_taken_as_often_as_was_drawn_and_the_same_seed_says_the_same() -> None:
    one, other = RarerWays(RARER), RarerWays(RARER)
    said = [one.lingers_s("tick late") + one.happens("busy") for _ in range(TIMES)]
    assert said == [other.lingers_s("tick late") + other.happens("busy") for _ in range(TIMES)]
    assert all(not it or LINGERS_S[0] <= it <= 1 + LINGERS_S[1] for it in said)
    for rarer in map(RarerWays, range(RARER, RARER + 20)):
        share = sum(rarer.happens("busy") for _ in range(TIMES)) / TIMES
        assert not share or any(abs(share - often) < 0.05 for often in OFTEN)


def test_once_all_is_mended_nothing_is_rarer() -> None:
    for rarer in map(RarerWays, range(RARER, RARER + 10)):
        rarer.is_over = True
        assert not any(rarer.happens(point) for point in POINTS for _ in range(50))
