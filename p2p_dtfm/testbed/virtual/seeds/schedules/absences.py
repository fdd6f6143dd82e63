"""Somebody is away for long, and the others go on, or come back in another order.

A founder waits for its fellows for a quarter of a minute, and for those that it was told to expect
for a minute. A peer that died is let in after some ten seconds. In most seeds a run is over by
then.
"""

import random
from collections.abc import Mapping

from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import NAMES, Fault, Schedule

WITHIN_S = (0.5, 4.0)
"""Time after the first step."""
LEFT_ALONE_S = (30.0, 45.0)
SOON_S, LATER_S = (0.5, 2.0), (8.0, 14.0)
OTHERS_DIE_S = (24.0, 36.0)
AHEAD_FOR_S = (16.0, 24.0)
SHORT_S = (0.2, 1.2)
BRIEF = {"pause": 2, "cut": 3, "one-way cut": 2, "slow link": 1}
"""Faults that end no life, with their weights."""
BRIEF_COUNT = (0, 2)


def absences(seed: int) -> Schedule:
    draws = random.Random(f"absences {seed}")
    faults = _a_founder_is_left(draws) if seed % 2 else _a_life_is_ahead(draws)
    return Schedule(
        tuple(NAMES[:3]),
        (),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        is_quick=True,
        is_slow=True,
        waits_for_a_step=True,
    )


def _a_founder_is_left(draws: random.Random) -> list[Fault]:
    """The founder and a fellow die. The third peer goes on, out of the founder's reach. The fellow
    is back while the founder waits, asks it, and is let in by the third. Then those two die."""
    founder, fellow, alone = NAMES[0], *draws.sample(NAMES[1:3], 2)
    at_s, dies_s = draws.uniform(*WITHIN_S), draws.uniform(*OTHERS_DIE_S)
    return [
        Fault(at_s, draws.uniform(*LEFT_ALONE_S), "cut", (founder, alone), 0.0),
        Fault(at_s, draws.uniform(*SOON_S), "kill", (founder,), 0.0),
        Fault(at_s, draws.uniform(*LATER_S), "kill", (fellow,), 0.0),
        Fault(at_s + dies_s, draws.uniform(*SOON_S), "kill", (fellow,), 0.0),
        Fault(at_s + dies_s, draws.uniform(*SOON_S), "kill", (alone,), 0.0),
    ]


def _a_life_is_ahead(draws: random.Random) -> list[Fault]:
    """A member dies, and comes back with a clock that is ahead. Once it is let in, it comes back
    with a right one."""
    names = NAMES[:3]
    at_s, whom = draws.uniform(*WITHIN_S), draws.choice(names[1:])
    ahead = Fault(at_s, draws.uniform(*AHEAD_FOR_S), "life ahead", (whom,), draws.random())
    return [ahead, *meanwhile(draws, names, ahead, BRIEF, BRIEF_COUNT, SHORT_S)]


def meanwhile(
    draws: random.Random,
    names: str,
    fault: Fault,
    kinds: Mapping[str, int],
    count: tuple[int, int],
    lasts_s: tuple[float, float],
) -> list[Fault]:
    """Faults that begin while `fault` lasts."""
    return [
        Fault(
            draws.uniform(fault.at_s, fault.at_s + fault.lasts_s),
            draws.uniform(*lasts_s),
            draws.choices(list(kinds), list(kinds.values()))[0],
            tuple(draws.sample(names, 2)),
            draws.random(),
        )
        for _ in range(draws.randint(*count))
    ]
