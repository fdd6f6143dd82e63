"""Machines sleep, as with a closed lid: one, some at once or all, for seconds or minutes.

A machine that sleeps for a few seconds goes on where it was. After five or so the others hold it
for dead, and go on without it. After half a minute those that are awake give up their lines to it.
By its own clock none of that time has passed.
"""

import random
from dataclasses import replace

from p2p_dtfm.testbed.virtual.seeds.schedules.absences import WITHIN_S, meanwhile
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import NAMES, OF_LINKS, Fault, Schedule

BEGUN = (3, 6)
SMALL = 0.4
ROUNDS = (1, 3)
MORE_ROUNDS = 2
"""More rounds in four of eight seeds: these have some fourteen faults, the others six."""
NEXT_AFTER_S = (4.0, 20.0)
"""Time to the next round of sleeps. Some of the round before may still sleep."""
SLEEPS_S = {(2.5, 5.0): 2, (5.0, 12.0): 3, (12.0, 28.0): 3, (32.0, 70.0): 3, (70.0, 180.0): 1}
"""Durations, and how often each is drawn."""
CLOSED_WITHIN_S = 2.0
"""All lids of one round close within this time."""
ALL, SOME = 0.25, 0.6
"""Below the first draw all sleep, below the second some do, and else one."""
TOGETHER = 0.5
"""The share of rounds in which all sleep equally long, though they do not begin together."""
STRICT = 0.5
"""The share of seeds in which only sleepers and the dead are out of reach."""
CRASHES = {"kill": 4, "power cut": 2, "slow disk": 2, "lost memory": 1}
BESIDES = {**CRASHES, "pause": 3, "cut": 2, "one-way cut": 1}
BESIDES_COUNT = (0, 3)
BESIDES_LAST_S = (0.3, 12.0)
IS_LATE = 0.4
"""The share of sleepers that get their network back some time after they wake, where that may
be."""
LATE_S = (0.5, 4.0)
"""How much later, where a machine has to look for its network."""
FORGETS = 0.3
"""The share of these for which a router between has forgotten the lines. They find that out by
themselves."""
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
    """Two peers are drawn, for the ends of a line; other faults take the first."""
    return fault if fault.kind in OF_LINKS else replace(fault, whom=fault.whom[:1])


def _without_network(draws: random.Random, sleep: Fault) -> Fault:
    """The sleeper is cut off from all others as it falls asleep, and for a while after it wakes."""
    bounds_s = FORGOTTEN_S if draws.random() < FORGETS else LATE_S
    lasts_s = sleep.lasts_s + draws.uniform(*bounds_s)
    return replace(sleep, kind="partition", lasts_s=lasts_s)
