"""Machines sleep, as with a closed lid: one, some at once or all, for seconds or minutes.

Whoever sleeps for a few seconds goes on where it was. After five or so it is held to be dead, and
the others go on without it; after half a minute its lines are given up by those who are awake. By
its own clock none of that time has passed.
"""

import random
from dataclasses import replace

from p2p_dtfm.testbed.virtual.seeds.schedules.absences import WITHIN_S, meanwhile
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import NAMES, OF_LINKS, Fault, Schedule

BEGUN = (3, 6)
SMALL = 0.4
ROUNDS = (1, 3)
MORE_ROUNDS = 2
"""In four of eight seeds: these have some fourteen faults, and the others six."""
NEXT_AFTER_S = (4.0, 20.0)
"""A round of sleeps; one of the round before may last still."""
SLEEPS_S = {(2.5, 5.0): 2, (5.0, 12.0): 3, (12.0, 28.0): 3, (32.0, 70.0): 3, (70.0, 180.0): 1}
"""How often so long."""
CLOSED_WITHIN_S = 2.0
"""Those of one round."""
ALL, SOME = 0.25, 0.6
"""In so many rounds all sleep; up to here some do, and else one."""
TOGETHER = 0.5
"""So many rounds of several last equally long, but for what parts their beginnings."""
STRICT = 0.5
"""In so many seeds nobody is out of reach but who sleeps or is dead."""
CRASHES = {"kill": 4, "power cut": 2, "slow disk": 2, "lost memory": 1}
BESIDES = {**CRASHES, "pause": 3, "cut": 2, "one-way cut": 1}
BESIDES_COUNT = (0, 3)
BESIDES_LAST_S = (0.3, 12.0)
IS_LATE = 0.4
"""Of so many who wake the network is back later, where it may be,"""
LATE_S = (0.5, 4.0)
"""as where it has to look for it,"""
FORGETS = 0.3
"""or so late, in so many of these, that a router between has forgotten its lines: it finds that
out by itself."""
FORGOTTEN_S = (15.0, 32.0)


def lids(seed: int) -> Schedule:
    draws = random.Random(f"lids {seed}")
    begun = NAMES[: draws.randint(*BEGUN)]
    is_strict = draws.random() < STRICT
    at_s, faults = draws.uniform(*WITHIN_S), list[Fault]()
    for _ in range(draws.randint(*ROUNDS) + MORE_ROUNDS * (seed % 8 >= 4)):
        sleeps = _round(draws, begun, at_s)
        faults += sleeps
        kinds = CRASHES if is_strict else BESIDES
        besides = meanwhile(draws, begun, sleeps[0], kinds, BESIDES_COUNT, BESIDES_LAST_S)
        faults += map(_of_one, besides)
        if not is_strict:
            faults += [_without_network(draws, it) for it in sleeps if draws.random() < IS_LATE]
        at_s += draws.uniform(*NEXT_AFTER_S)
    return Schedule(
        tuple(begun),
        (),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        is_small=draws.random() < SMALL,
        is_quick=True,
        is_slow=True,
        is_long=True,
        waits_for_a_step=True,
    )


def _round(draws: random.Random, begun: str, at_s: float) -> list[Fault]:
    share = draws.random()
    count = draws.randint(2, len(begun) - 1) if share < SOME else 1
    if share < ALL:
        count = len(begun)
    lasts_s = _drawn_s(draws)
    is_together = draws.random() < TOGETHER
    return [
        Fault(
            at_s + draws.uniform(0.0, CLOSED_WITHIN_S),
            lasts_s if is_together else _drawn_s(draws),
            "lid",
            (name,),
            draws.random(),
        )
        for name in draws.sample(begun, count)
    ]


def _drawn_s(draws: random.Random) -> float:
    bounds_s = draws.choices(list(SLEEPS_S), list(SLEEPS_S.values()))[0]
    return draws.uniform(*bounds_s)


def _of_one(fault: Fault) -> Fault:
    """Two are drawn, for the ends of a line."""
    return fault if fault.kind in OF_LINKS else replace(fault, whom=fault.whom[:1])


def _without_network(draws: random.Random, sleep: Fault) -> Fault:
    """It is cut off from all others as it falls asleep, and for a while longer."""
    bounds_s = FORGOTTEN_S if draws.random() < FORGETS else LATE_S
    lasts_s = sleep.lasts_s + draws.uniform(*bounds_s)
    return replace(sleep, kind="partition", lasts_s=lasts_s)
