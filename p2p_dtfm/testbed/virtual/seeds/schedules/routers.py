"""Some machines are behind routers, and their relays go away, mostly several times in a seed.

A peer behind a router finds out within seconds that its relay is gone, and takes another one. So
machines are slow: else the run would be over by then.
"""

import random
from dataclasses import replace

from p2p_dtfm.testbed.virtual.seeds.schedules.ordinary import any_fault
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import LASTING_S, NAMES, Fault, Schedule

BEGUN = (4, 7)
JOINERS = (0, 1)
WITHIN_S = (0.5, 30.0)
"""Time after the first step."""
WITH_FOUNDER = 0.3
"""The share of seeds in which the founder is behind a router, so that all meet elsewhere."""
RELAYS_DIE = (2, 4)
TOGETHER = 0.5
"""The share of dead relays with which somebody else dies, or is cut off."""
WITH_RELAYS = {"kill": 3, "pause": 1, "partition": 1}
BESIDES = {
    "kill": 3,
    "power cut": 1,
    "pause": 2,
    "leave": 1,
    "cut": 2,
    "one-way cut": 1,
    "partition": 1,
    "slow link": 1,
    "lossy link": 1,
}
BESIDES_COUNT = (5, 9)


def routers(seed: int) -> Schedule:
    draws = random.Random(f"routers {seed}")
    count, joiner_count = draws.randint(*BEGUN), draws.randint(*JOINERS)
    begun, joiners = NAMES[:count], NAMES[count : count + joiner_count]
    behind_count = max(draws.randint(1, count // 2) for _ in range(2))
    behind = draws.sample(begun[1:], behind_count)
    if draws.random() < WITH_FOUNDER:
        behind[0] = begun[0]
    if joiners and draws.random() < len(behind) / count:
        behind += joiners
    faults = [_within(draws, Fault(0.0, 0.0, "join", (name,), 0.0)) for name in joiners]
    for _ in range(draws.randint(*RELAYS_DIE)):
        faults += _relay_dies(draws, begun)
    for _ in range(draws.randint(*BESIDES_COUNT)):
        faults.append(_within(draws, any_fault(draws, BESIDES, begun, joiners)))
    return Schedule(
        tuple(begun),
        tuple(joiners),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        behind=tuple(sorted(behind)),
        is_quick=True,
        is_slow=True,
        waits_for_a_step=True,
        lanes_are_apart=draws.random() < 0.5,
    )


def _relay_dies(draws: random.Random, begun: str) -> list[Fault]:
    """A relay dies alone, or at once with somebody that the seed draws."""
    lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
    dies = _within(draws, Fault(0.0, lasts_s, "dead relay", (), draws.random()))
    if draws.random() >= TOGETHER:
        return [dies]
    other = any_fault(draws, WITH_RELAYS, begun, ())
    return [dies, replace(other, at_s=dies.at_s)]


def _within(draws: random.Random, fault: Fault) -> Fault:
    return replace(fault, at_s=draws.uniform(*WITHIN_S))
