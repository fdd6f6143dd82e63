"""Which schedule a seed has."""

from collections.abc import Callable

from p2p_dtfm.testbed.virtual.seeds.schedules.absences import absences
from p2p_dtfm.testbed.virtual.seeds.schedules.crashes import quick_storm, storm
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import (
    ABSENCES,
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
    RECIPES,
    STORMS,
)
from p2p_dtfm.testbed.virtual.seeds.schedules.late_words import late_words
from p2p_dtfm.testbed.virtual.seeds.schedules.liars import lies, lies_in_stages, quick_lies
from p2p_dtfm.testbed.virtual.seeds.schedules.lids import lids
from p2p_dtfm.testbed.virtual.seeds.schedules.moments import moments
from p2p_dtfm.testbed.virtual.seeds.schedules.ordinary import dumb, ordinary, otherwise, quick
from p2p_dtfm.testbed.virtual.seeds.schedules.partings import partings
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule

FAMILIES: tuple[tuple[int, Callable[[int], Schedule]], ...] = (
    (LIDS, lids),
    (PARTINGS, partings),
    (DUMB, dumb),
    (ABSENCES, absences),
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
"""The last ones first."""


def draw(seed: int) -> Schedule:
    """The same for the same seed."""
    return next(family(seed) for first, family in FAMILIES if seed >= first)
