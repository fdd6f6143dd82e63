"""Which schedule a seed has."""

from collections.abc import Callable
from dataclasses import replace

from p2p_dtfm.testbed.virtual.seeds.schedules.absences import absences
from p2p_dtfm.testbed.virtual.seeds.schedules.crashes import quick_storm, storm
from p2p_dtfm.testbed.virtual.seeds.schedules.crowds import crowds
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import (
    ABSENCES,
    CROWDS,
    DUMB,
    LATE_WORDS,
    LIDS,
    LIES,
    LIES_IN_STAGES,
    MOMENTS,
    PARTINGS,
    QUICK,
    QUICK_LIES,
    QUICK_STORMS,
    RARER,
    RARER_LIES,
    RECIPES,
    ROUTERS,
    STORMS,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.late_words import late_words
from p2p_dtfm.testbed.virtual.seeds.schedules.liars import (
    lies,
    lies_in_stages,
    quick_lies,
    rarer_lies,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.lids import lids
from p2p_dtfm.testbed.virtual.seeds.schedules.moments import moments
from p2p_dtfm.testbed.virtual.seeds.schedules.ordinary import (
    dumb,
    ordinary,
    otherwise,
    quick,
    rarer,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.partings import partings
from p2p_dtfm.testbed.virtual.seeds.schedules.routers import routers
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule

FAMILIES: tuple[tuple[int, Callable[[int], Schedule]], ...] = (
    (LIDS, lids),
    (PARTINGS, partings),
    (DUMB, dumb),
    (CROWDS, crowds),
    (ABSENCES, absences),
    (ROUTERS, routers),
    (RARER_LIES, rarer_lies),
    (RARER, rarer),
    (LATE_WORDS, late_words),
    (MOMENTS, moments),
    (QUICK_STORMS, quick_storm),
    (QUICK_LIES, quick_lies),
    (QUICK, quick),
    (LIES_IN_STAGES, lies_in_stages),
    (RECIPES, otherwise),
    (LIES, lies),
    (STORMS, storm),
    (0, ordinary),
)
"""Families, from the one that begins last to the first seeds."""
COMPARED = 4
"""In one seed of so many, what daemons tell is compared with the truth. That changes no trace."""


def draw(seed: int) -> Schedule:
    """The schedule of a seed, always the same."""
    schedule = next(family(seed) for first, family in FAMILIES if seed >= first)
    is_compared = schedule.is_watched or seed % COMPARED == COMPARED - 1
    return replace(schedule, is_compared=is_compared)
