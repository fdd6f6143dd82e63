"""Seeds in which machines only crash: what is told to be safe rests on the others."""

import random

from p2p_dtfm.testbed.virtual.seeds.schedules.ordinary import any_fault, sooner
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import (
    CRASHES,
    FIRST_S,
    LAST_S,
    NAMES,
    Fault,
    Schedule,
)

STORM_OF = "abcdefgh"
KILLED_EVERY_S = (0.8, 3.0)
BACK_AFTER_S = (0.3, 2.0)
BEGUN_IN_QUICK_STORMS = (3, 6)
CRASHES_IN_QUICK_STORMS = (6, 10)


def storm(seed: int) -> Schedule:
    """The places of the dead are taken by replicas and spares, again and again, in mid-step."""
    draws = random.Random(f"storm {seed}")
    faults, at_s = list[Fault](), FIRST_S
    while (at_s := at_s + draws.uniform(*KILLED_EVERY_S)) < LAST_S:
        whom, lasts_s = draws.choice(STORM_OF), draws.uniform(*BACK_AFTER_S)
        faults.append(Fault(at_s, lasts_s, "kill", (whom,), draws.random()))
    return Schedule(tuple(STORM_OF), (), tuple(faults), is_small=draws.random() < 0.7)


def quick_storm(seed: int) -> Schedule:
    draws = random.Random(f"quick storm {seed}")
    count, joiner_count = draws.randint(*BEGUN_IN_QUICK_STORMS), draws.randint(0, 1)
    begun, joiners = NAMES[:count], NAMES[count : count + joiner_count]
    faults = [
        any_fault(draws, CRASHES, begun, joiners)
        for _ in range(draws.randint(*CRASHES_IN_QUICK_STORMS))
    ]
    faults += [Fault(draws.uniform(FIRST_S, LAST_S), 0.0, "join", (it,), 0.0) for it in joiners]
    return Schedule(
        tuple(begun),
        tuple(joiners),
        tuple(sorted(map(sooner, faults), key=lambda fault: fault.at_s)),
        is_small=True,
        is_quick=True,
        waits_for_a_step=True,
        lanes_are_apart=True,
    )
