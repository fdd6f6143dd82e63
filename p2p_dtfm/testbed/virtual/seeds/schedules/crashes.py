"""Seeds in which machines only crash: what is told to be safe rests on the others."""

import random

from p2p_dtfm.testbed.virtual.seeds.schedules.ordinary import QUICK_LAST_S, any_fault, sooner
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import (
    CRASHES,
    FIRST_S,
    LAST_S,
    LASTING_S,
    NAMES,
    QUICK_STEPS,
    Fault,
    Schedule,
)

STORM_OF = "abcdefgh"
KILLED_EVERY_S = (0.8, 3.0)
BACK_AFTER_S = (0.3, 2.0)
SMALL = 0.7
"""The share of storms with small machines. In the others each has room for the whole model."""
BEGUN_IN_QUICK_STORMS = (3, 6)
CRASHES_IN_QUICK_STORMS = (12, 16)
CRASHES_AT_THE_END = (0, 2)
AFTER_THE_END_S = (0.0, 3.0)
"""These crash all at once, when the last step may be on nobody's disk yet."""
FULL_FROM_STEP = 13
TIGHT = 0.5


def storm(seed: int) -> Schedule:
    """Replicas and spares take the places of the dead, again and again, in mid-step."""
    draws = random.Random(f"storm {seed}")
    faults, at_s = list[Fault](), FIRST_S
    while (at_s := at_s + draws.uniform(*KILLED_EVERY_S)) < LAST_S:
        whom, lasts_s = draws.choice(STORM_OF), draws.uniform(*BACK_AFTER_S)
        faults.append(Fault(at_s, lasts_s, "kill", (whom,), draws.random()))
    return Schedule(tuple(STORM_OF), (), tuple(faults), is_small=draws.random() < SMALL)


def quick_storm(seed: int) -> Schedule:
    draws = random.Random(f"quick storm {seed}")
    count, joiner_count = draws.randint(*BEGUN_IN_QUICK_STORMS), draws.randint(0, 1)
    begun, joiners = NAMES[:count], NAMES[count : count + joiner_count]
    faults = [
        any_fault(draws, CRASHES, begun, joiners)
        for _ in range(draws.randint(*CRASHES_IN_QUICK_STORMS))
    ]
    faults += [Fault(draws.uniform(FIRST_S, LAST_S), 0.0, "join", (it,), 0.0) for it in joiners]
    faults = [*map(sooner, faults), *_at_the_end(seed, begun)]
    return Schedule(
        tuple(begun),
        tuple(joiners),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        is_small=random.Random(f"size {seed}").random() < SMALL,
        is_quick=True,
        waits_for_a_step=True,
        lanes_are_apart=True,
        rooms_are_tight=random.Random(f"rooms {seed}").random() < TIGHT,
        goes_on_after_the_end=True,
    )


def _at_the_end(seed: int, begun: str) -> list[Fault]:
    """Peers that are done with the last step may have to make it once more."""
    draws = random.Random(f"end of quick storm {seed}")
    crash_count = draws.randint(*CRASHES_AT_THE_END)
    full = draws.sample(begun, draws.randint(0, len(begun)) if crash_count else 0)
    faults = [
        Fault(
            QUICK_LAST_S,
            draws.choice(LASTING_S),
            "full disk",
            (it,),
            0.0,
            at_step=FULL_FROM_STEP,
        )
        for it in full
    ]
    after_s = draws.uniform(*AFTER_THE_END_S)
    at_s = QUICK_LAST_S + after_s
    for name in draws.sample(begun, crash_count):
        kind, lasts_s = draws.choice(("kill", "power cut")), draws.choice(LASTING_S)
        faults.append(
            Fault(at_s, lasts_s, kind, (name,), 0.0, at_step=QUICK_STEPS, after_s=after_s)
        )
    return faults
