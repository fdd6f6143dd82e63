"""While a few train many others come, nearly at once. Later a part of all goes at once.

The run has room for a few with a stage. Most of a crowd are spares, guardians or replicas.
"""

import random

from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LARGE_CROWDS
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import NAMES, OF_LINKS, Fault, Schedule

BEGUN = (3, 8)
CROWD, LARGE_CROWD = (24, 56), (200, 200)
COMES_FROM_STEP = 2
COMES_WITHIN_S = (1.0, 2.0)
ROOMY = 0.2
"""The share of a crowd with room for the whole model. Of those that begin, half have it."""
BACK_WITH_IT = (0, 2)
"""So many of those that begin go before, and come back with the crowd: their homes are old."""
GO_AS_THEY_JOIN = (2, 5)
JOINS_FOR_S = (0.05, 4.0)
"""Faults done to a newcomer begin so long after its start."""
GONE_FOR_S = (0.5, 6.0)
FAULTS = (3, 6)
KINDS = {"kill": 3, "power cut": 2, "pause": 2, "cut": 2, "one-way cut": 2, "lost memory": 1}
FAULTS_FROM_S = (12.0, 24.0)
"""Time after the crowd begins to come."""
LASTS_S = (0.3, 8.0)
PART_GOES = (0.25, 0.5)
GOES_AFTER_S = 26.0
CRASH_AT_ONCE = 0.4
"""In this share of seeds those that go are killed, and come back together. In the others they are
told to leave for good."""
AT_ONCE_S = 0.3
AWAY_FOR_S = (2.0, 8.0)


def crowds(seed: int) -> Schedule:
    draws = random.Random(f"crowds {seed}")
    begun = NAMES[: draws.randint(*BEGUN)]
    count = draws.randint(*(LARGE_CROWD if seed >= LARGE_CROWDS else CROWD))
    crowd = tuple(f"{place:03}" for place in range(count))
    within_s = draws.uniform(*COMES_WITHIN_S)
    comes_s = {name: draws.uniform(0.0, within_s) for name in crowd}
    faults = [_fault("join", (name,), at_s) for name, at_s in comes_s.items()]
    faults += _back_with_it(draws, begun, within_s) + _as_they_join(draws, comes_s)
    faults += [_any(draws, [*begun, *crowd]) for _ in range(draws.randint(*FAULTS))]
    faults += _a_part_goes(draws, begun, crowd)
    roomy = [name for name in begun if draws.random() < 0.5]
    roomy += [name for name in crowd if draws.random() < ROOMY]
    return Schedule(
        tuple(begun),
        crowd,
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        is_small=True,
        is_crowd=True,
        roomy=tuple(roomy),
        is_quick=True,
        is_slow=True,
        waits_for_a_step=True,
    )


def _fault(kind: str, whom: tuple[str, ...], at_s: float, lasts_s: float = 0.0) -> Fault:
    """A fault so long after the crowd began to come."""
    return Fault(at_s, lasts_s, kind, whom, 0.0, at_step=COMES_FROM_STEP, after_s=at_s)


def _back_with_it(draws: random.Random, begun: str, within_s: float) -> list[Fault]:
    """The founder stays: those that begin wait for it."""
    faults = list[Fault]()
    for name in draws.sample(begun[1:], draws.randint(*BACK_WITH_IT)):
        back_s = draws.uniform(0.0, within_s)
        away_s = draws.uniform(*AWAY_FOR_S)
        kind = draws.choice(("kill", "leave"))
        faults.append(Fault(0.0, away_s + back_s, kind, (name,), 0.0, at_step=1))
    return faults


def _as_they_join(draws: random.Random, comes_s: dict[str, float]) -> list[Fault]:
    """Some newcomers go and come back; others have changed their minds, and stay away."""
    whom = draws.sample(sorted(comes_s), draws.randint(*GO_AS_THEY_JOIN))
    kinds = ("kill", "power cut", "leave", "go home")
    return [
        _fault(
            draws.choice(kinds),
            (name,),
            comes_s[name] + draws.uniform(*JOINS_FOR_S),
            draws.uniform(*GONE_FOR_S),
        )
        for name in whom
    ]


def _any(draws: random.Random, names: list[str]) -> Fault:
    """A fault done to anybody, once the crowd is in."""
    kind = draws.choices(list(KINDS), list(KINDS.values()))[0]
    whom = tuple(draws.sample(names, 2 if kind in OF_LINKS else 1))
    return _fault(kind, whom, draws.uniform(*FAULTS_FROM_S), draws.uniform(*LASTS_S))


def _a_part_goes(draws: random.Random, begun: str, crowd: tuple[str, ...]) -> list[Fault]:
    """All of them go within a moment. The founder stays."""
    names = [*begun[1:], *crowd]
    whom = draws.sample(names, int(len(names) * draws.uniform(*PART_GOES)))
    dies = draws.random() < CRASH_AT_ONCE
    away_s = draws.uniform(*AWAY_FOR_S)
    return [
        _fault(
            "kill" if dies else "go home",
            (name,),
            GOES_AFTER_S + draws.uniform(0.0, AT_ONCE_S),
            away_s,
        )
        for name in whom
    ]
