"""One word is late, all else goes on, and somebody dies meanwhile.

A member that has all Prepared of a step is then a step ahead of one that lacks one. Links that are
slow, or lose pieces, do not test that: they hold up all that they carry, or hit that one word once
in thousands.
"""

import random
from dataclasses import replace

from p2p_dtfm.testbed.virtual.seeds.schedules.crashes import TIGHT
from p2p_dtfm.testbed.virtual.seeds.schedules.moments import JUST_AFTER_S, KINDS, LASTING_S
from p2p_dtfm.testbed.virtual.seeds.schedules.ordinary import (
    QUICK_FIRST_S,
    QUICK_LAST_S,
    QUICK_LAST_STEP,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import NAMES, Fault, Schedule

BEGUN = (3, 6)
FAULTS = (12, 16)
LATE_S = (1.2, 2.4)
"""Longer than it takes to miss a dead peer. It is less than half of what a call may take, and of
the patience with a member that should have said something."""
MEANWHILE_S = (0.05, 0.9)
IN_PAIRS = 0.2
"""The share of faults in which a guardian's word is late, and the guardian dies meanwhile. In what
the others agree on then, another word is late."""
OF_PREPARED = 0.6
"""The share of other faults in which the word is what commits a step."""
MESSAGES = ("receipt", "ready", "active", "committed", "follow_done", "synced")
"""Other words for which a peer waits."""
ALONE = 0.15
"""The share of faults in which a word is late, and nothing else happens."""
ON_TIME = 0.15
"""The share in which a word is on time, and its speaker or hearer dies."""
OF_OTHERS = 0.7
"""The share of deaths while a word is late that hit neither its speaker nor its hearer."""
DEATHS = {"kill": KINDS["kill"], "power cut": KINDS["power cut"]}
AT_ONCE, LATER = 0.0, 0.99
"""Draws by which the next fault of a calm seed begins together with this one, or does not."""


def late_words(seed: int) -> Schedule:
    """A few small machines in a short run: most layers have one or two holders."""
    draws = random.Random(f"late words {seed}")
    begun = NAMES[: draws.randint(*BEGUN)]
    count, faults = draws.randint(*FAULTS), list[Fault]()
    while len(faults) < count:
        is_pair = draws.random() < IN_PAIRS
        faults += _pair(draws, begun) if is_pair else [_fault(draws, begun)]
    return Schedule(
        tuple(begun),
        (),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        is_small=True,
        is_quick=True,
        is_calm=True,
        waits_for_a_step=True,
        rooms_are_tight=draws.random() < TIGHT,
        lanes_are_apart=True,
    )


def _pair(draws: random.Random, begun: str) -> list[Fault]:
    """Two faults, which begin together."""
    dies = replace(_death(draws, begun), draw=AT_ONCE, at_message="receipt")
    late = replace(
        dies, kind="late word", draw=LATER, at_message="ready", late_s=draws.uniform(*LATE_S)
    )
    return [dies, late]


def _fault(draws: random.Random, begun: str) -> Fault:
    fault = _death(draws, begun)
    kind = draws.random()
    if kind < ALONE:
        return replace(fault, kind="late word")
    if kind < ALONE + ON_TIME:
        return replace(fault, late_s=0.0, after_s=draws.choice(JUST_AFTER_S))
    return replace(fault, is_of_third=draws.random() < OF_OTHERS)


def _death(draws: random.Random, begun: str) -> Fault:
    """The death of a peer that says a late word."""
    share = draws.random()
    return Fault(
        QUICK_FIRST_S + share * (QUICK_LAST_S - QUICK_FIRST_S),
        draws.choice(LASTING_S) * draws.uniform(0.5, 1.5),
        draws.choices(list(DEATHS), list(DEATHS.values()))[0],
        (draws.choice(begun),),
        draws.random(),
        at_step=1 + int(share * (QUICK_LAST_STEP - 1)),
        after_s=draws.uniform(*MEANWHILE_S),
        at_message="prepared" if draws.random() < OF_PREPARED else draws.choice(MESSAGES),
        late_s=draws.uniform(*LATE_S),
    )
