"""Machines crash, and links break, as something is said: between two words that belong together."""

import random
from dataclasses import replace

from p2p_dtfm.testbed.virtual.seeds.schedules.crashes import SMALL, TIGHT
from p2p_dtfm.testbed.virtual.seeds.schedules.ordinary import (
    QUICK_FIRST_S,
    QUICK_FOUNDING,
    QUICK_LAST_S,
    QUICK_LAST_STEP,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import (
    CALM_STEPS,
    NAMES,
    OF_LINKS,
    QUICK_STEPS,
    Fault,
    Schedule,
)

BEGUN = (3, 6)
JOINERS = (0, 2)
FAULTS = (16, 20)
LASTING_S = (0.3, 0.6, 1.5, 3.0, 6.0)
JUST_AFTER_S = (0.0, 0.0, 0.001, 0.005, 0.02)
"""A message takes 0.2 to 10 ms."""
BETWEEN_TWO_WORDS = 0.5
"""The share of those that die as they speak to several, and have then spoken to one only."""
ONLY_CRASHES = 0.4
"""The share of seeds with crashes alone."""
CALM = 0.5
APART = 0.5
AUDITED = 0.125
LET_IN_WITHIN_S = 12.0
LIVES_AHEAD = 7
"""The seed of eight in which somebody first lives by a clock that is ahead, and then by a right
one."""

KINDS = {
    "kill": 5,
    "power cut": 2,
    "pause": 3,
    "leave": 2,
    "cut": 4,
    "one-way cut": 4,
    "slow link": 2,
    "lossy link": 1,
    "doubled calls": 1,
    "lost layer": 1,
}
CRASHES = {"kill": 6, "power cut": 2, "lost layer": 1}
LOST_AT_THE_END = 0.5
AFTER_THE_END_S = (0.0, 1.0)
OF_VIEWS = "gather ready synced active standing join_request knock hello heartbeat"
OF_STATES = (
    "follow layer_offered confirm committed follow_done receipt cut_begun cut_receipt checkpoint"
    " state_digest"
)
OF_STEPS = "prepared"
MESSAGES = tuple(f"{OF_VIEWS} {OF_STATES} {OF_STEPS}".split())
"""What few daemons tell one another in calls."""
AT_STEPS = 0.25
"""The share of faults that wait, besides, for what commits a step."""


def moments(seed: int) -> Schedule:
    """Three to eight daemons in a short run."""
    draws = random.Random(f"moments {seed}")
    count, joiner_count = draws.randint(*BEGUN), draws.randint(*JOINERS)
    begun, joiners = NAMES[:count], NAMES[count : count + joiner_count]
    kinds = CRASHES if draws.random() < ONLY_CRASHES else KINDS
    is_calm = draws.random() < CALM
    faults = [_fault(draws, kinds, begun + joiners) for _ in range(draws.randint(*FAULTS))]
    faults += [replace(_fault(draws, {"join": 1}, it), at_message="") for it in joiners]
    if seed % 8 == LIVES_AHEAD:
        ahead = _fault(random.Random(f"lives {seed}"), {"life ahead": 1}, begun)
        faults.append(replace(ahead, at_s=0.0, at_step=1, lasts_s=LET_IN_WITHIN_S))
    if kinds is CRASHES and draws.random() < LOST_AT_THE_END:
        faults.append(_at_the_end(draws, begun, CALM_STEPS if is_calm else QUICK_STEPS))
    return Schedule(
        tuple(begun),
        tuple(joiners),
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        is_small=draws.random() < SMALL,
        is_quick=True,
        is_calm=is_calm,
        waits_for_a_step=draws.random() >= QUICK_FOUNDING,
        rooms_are_tight=draws.random() < TIGHT,
        goes_on_after_the_end=kinds is CRASHES,
        lanes_are_apart=draws.random() < APART,
        is_audited=draws.random() < AUDITED,
    )


def _fault(draws: random.Random, kinds: dict[str, int], names: str) -> Fault:
    kind = draws.choices(list(kinds), list(kinds.values()))[0]
    whom = tuple(draws.sample(names, 2 if kind in OF_LINKS else 1))
    share = draws.random()
    return Fault(
        QUICK_FIRST_S + share * (QUICK_LAST_S - QUICK_FIRST_S),
        draws.choice(LASTING_S) * draws.uniform(0.5, 1.5),
        kind,
        whom,
        draws.random(),
        at_step=1 + int(share * (QUICK_LAST_STEP - 1)),
        after_s=draws.choice(JUST_AFTER_S),
        at_message=OF_STEPS if draws.random() < AT_STEPS else draws.choice(MESSAGES),
        is_of_goal=draws.random() < 0.5,
        comes_before=kind in CRASHES and draws.random() < BETWEEN_TWO_WORDS,
    )


def _at_the_end(draws: random.Random, begun: str, step: int) -> Fault:
    """Peers that are done with the run have to make once more what is lost then."""
    after_s = draws.uniform(*AFTER_THE_END_S)
    return Fault(
        QUICK_LAST_S + after_s,
        draws.choice(LASTING_S),
        "lost layer",
        (begun[0],),
        draws.random(),
        at_step=step,
        after_s=after_s,
    )
