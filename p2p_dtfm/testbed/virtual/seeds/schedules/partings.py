"""A swarm is divided, and its sides meet again in the middle of a long run of slow machines.

In most seeds a run is over soon after the last fault: sides that have not met by then have trained
apart to the end. Here so much of the run is left that it shows if a swarm stays divided.
"""

import random

from p2p_dtfm.testbed.virtual.seeds.schedules.absences import WITHIN_S, meanwhile
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import NAMES, Fault, Schedule

BEGUN = (3, 6)
APART_S = (4.0, 20.0)
PARTINGS = (1, 2)
AGAIN_AFTER_S = (2.0, 8.0)
"""Time to the next parting. The one before may still last."""
ALONE = 0.3
"""The share of partings that cut one peer off from all others."""
BESIDES = {"kill": 3, "pause": 1, "one-way cut": 2, "cut": 2, "lost memory": 1}
BESIDES_COUNT = (0, 3)
BESIDES_LAST_S = (0.3, 6.0)


def partings(seed: int) -> Schedule:
    draws = random.Random(f"partings {seed}")
    begun = NAMES[: draws.randint(*BEGUN)]
    at_s, faults = draws.uniform(*WITHIN_S), list[Fault]()
    for _ in range(draws.randint(*PARTINGS)):
        size = 1 if draws.random() < ALONE else draws.randint(1, len(begun) - 1)
        side = tuple(sorted(draws.sample(begun, size)))
        parting = Fault(at_s, draws.uniform(*APART_S), "partition", side, 0.0)
        faults.append(parting)
        faults += meanwhile(draws, begun, parting, BESIDES, BESIDES_COUNT, BESIDES_LAST_S)
        at_s += draws.uniform(*AGAIN_AFTER_S)
    return Schedule(
        tuple(begun),
        (),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        is_quick=True,
        is_slow=True,
        is_long=True,
        waits_for_a_step=True,
    )
