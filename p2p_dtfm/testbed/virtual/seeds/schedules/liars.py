"""Seeds in which some lie, in a run with audits."""

import math
import random
from dataclasses import replace

from p2p_dtfm.testbed.virtual.lies.lying import KINDS as KINDS_OF_LIES
from p2p_dtfm.testbed.virtual.lies.lying import SELDOM_TOLD
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import (
    LIES,
    LIES_IN_STAGES,
    QUICK_LIES,
    RARER_LIES,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import LASTING_S, NAMES, Fault, Schedule

BEGUN_WITH_LIARS = (4, 4, 5, 6, 8)
RATES = (1.0, 0.5)
LIES_LAST_S = (1.0, 3.0, math.inf)
"""The last one never ends."""
FIRST_LIE_S, LAST_LIE_S, LAST_WITH_LIES_S = 1.0, 4.0, 8.0
"""Runs with liars are short."""
BEGUN_IN_STAGES = (6, 7)
KINDS_IN_STAGES = ("activation", "edge-out", "parameters", "flip", "sum", "loss")
APART = (2, 5)
"""Seeds of eight, with and without crashes, in which lanes have no order among each other."""
OUTAGE = 4
"""The seed of eight in which all lose power at once, and those that began come back."""
OUTAGE_S = (5.0, 8.0)
BESIDE_LIES = {"kill": 3, "power cut": 1, "pause": 2, "leave": 2, "slow disk": 1, "clock": 1}
BESIDE_LIES_COUNT = (2, 4)


def lies(seed: int) -> Schedule:
    """Each peer that begins or joins has the whole model. With fewer than three that can compute a
    work again, nothing is promised."""
    draws = random.Random(f"lies {seed}")
    count, joiner_count = draws.choice(BEGUN_WITH_LIARS), draws.randint(0, 2)
    begun, joiners = NAMES[:count], NAMES[count : count + joiner_count]
    liars, together = tuple(sorted(draws.sample(begun, count // 4))), draws.random() < 0.5
    faults = [
        Fault(draws.uniform(FIRST_LIE_S, LAST_WITH_LIES_S), 0.0, "join", (name,), 0.0)
        for name in joiners
    ]
    for whom in [liars] if together else [(name,) for name in liars]:
        kinds = set[str]()
        for _ in range(draws.randint(1, 2)):
            at_s, lasts_s = draws.uniform(FIRST_LIE_S, LAST_LIE_S), draws.choice(LIES_LAST_S)
            faults.append(Fault(at_s, lasts_s, "lie", whom, 0.0, draws.choice(KINDS_OF_LIES)))
            kinds.add(faults[-1].what)
        if kinds <= SELDOM_TOLD:
            faults.append(_another_lie(seed, whom))
    for _ in range(draws.randint(*BESIDE_LIES_COUNT) if seed % 2 else 0):
        kind = draws.choices(list(BESIDE_LIES), list(BESIDE_LIES.values()))[0]
        lasts_s = draws.choice(LASTING_S) * draws.uniform(0.5, 1.5)
        at_s, whom = draws.uniform(FIRST_LIE_S, LAST_WITH_LIES_S), (draws.choice(begun + joiners),)
        faults.append(Fault(at_s, lasts_s, kind, whom, draws.random()))
    if seed % 8 == OUTAGE:
        at_s, lasts_s = draws.uniform(*OUTAGE_S), draws.uniform(0.5, 3.0)
        faults.append(Fault(at_s, lasts_s, "outage", tuple(begun), 0.0))
    faults.sort(key=lambda fault: fault.at_s)
    return Schedule(
        tuple(begun),
        tuple(joiners),
        tuple(faults),
        is_audited=True,
        liars=liars,
        lie_together=together,
        audit_rate=draws.choice(RATES),
        lanes_are_apart=seed % 8 in APART,
    )


def quick_lies(seed: int) -> Schedule:
    """The same lies, on links that take few probes."""
    return replace(lies(seed - QUICK_LIES + LIES), is_quick=True)


def lies_in_stages(seed: int) -> Schedule:
    """One of six or seven lies. No machine has room for the whole model, so members of other stages
    judge as well. Two liars would be most of a stage's three holders, whose norms and states are
    their word."""
    draws = random.Random(f"lies in stages {seed}")
    plain = lies(seed - LIES_IN_STAGES + LIES)
    count = draws.choice(BEGUN_IN_STAGES)
    begun, liar = tuple(NAMES[:count]), draws.choice(NAMES[:count])
    joiners = tuple(NAMES[count : count + len(plain.joiners)])
    renamed = dict(zip(plain.joiners, joiners, strict=True))

    def of_these(fault: Fault) -> Fault:
        if fault.kind == "lie":
            what = draws.choice(KINDS_IN_STAGES) if draws.random() < 0.5 else fault.what
            return replace(fault, whom=(liar,), what=what)
        whom = fault.whom[0]
        return replace(fault, whom=(renamed.get(whom, draws.choice(begun)),))

    return replace(
        plain,
        begun=begun,
        joiners=joiners,
        faults=tuple(map(of_these, plain.faults)),
        is_small=True,
        liars=(liar,),
        lie_together=False,
    )


def rarer_lies(seed: int) -> Schedule:
    """Rare ways happen all the time: words of honest members are late, or lost."""
    place, in_stages = divmod(seed - RARER_LIES, 2)
    plain = lies_in_stages(LIES_IN_STAGES + place) if in_stages else quick_lies(QUICK_LIES + place)
    return replace(plain, is_quick=True, goes_rarer_ways=True)


def _another_lie(seed: int, whom: tuple[str, ...]) -> Fault:
    """A lie that is told in any case. It comes first, and is over once it was told."""
    draws = random.Random(f"another lie {seed} {whom}")
    what = draws.choice([kind for kind in KINDS_OF_LIES if kind not in SELDOM_TOLD])
    return Fault(FIRST_LIE_S / 2, FIRST_LIE_S / 4, "lie", whom, 0.0, what)
