"""Cuts: copies of all layers at one step, taken every so often beside training.

Where a guardian that keeps up with each step would hold up steps, guardians lag. They get a copy of
the states as of one step, the same for all layers, as fast as a tenth of the line carries it. A run
is deterministic: going back to such a cut loses nothing but the time to repeat the steps since.

    begun    every stage-holder keeps a copy of its layers as of the cut's step
    kept     the guardians of the layers that a holder holds alone have said that they have theirs
    whole    all stage-holders have said so, in the Prepared of one step: all members know it alike

The next cut begins when the one before is whole, and not before `every_steps` have passed. So
nobody keeps more than two cuts, and which steps are cut follows from what all members know.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.units import MILLISECOND_NS, SECOND_NS

LAGGING_STEP_SHARE = 50
"""Guardians lag where waiting for them would take more than one part in so many of a step: 2%."""
LINE_SHARE = 10
"""Cuts may take one part in so many of a line: a tenth."""
TRAINING_SHARE = 100
"""Cuts may take a hundredth of training's time, wherever that makes a failure cost less."""
STATE_PARTS = 3
"""Parts that are copied of a layer: parameters and two moments."""
HELD_CUTS = 2
"""Cuts that are kept: the newest whole one, and the one under way."""
LIMIT_NS = 30 * SECOND_NS
LIMIT_STEPS = 20
"""A failure may cost `LIMIT_NS` or so many steps, whichever is more."""
FAILURE_EVERY_NS = 3600 * SECOND_NS
"""How often the model takes one of a view's members to fail."""
COPY_BYTES_PER_S = 1_000_000_000
LEAST_STEP_NS = 50 * MILLISECOND_NS
"""The shortest step through daemons, however little there is to compute. Plans know nothing of
messages: as many steps as they predict to be a moment would be many seconds apart."""
LEAST_CUT_NS = 10 * MILLISECOND_NS
"""The least time that a cut takes from training: copying, hashing, messages."""

Holder = TypeVar("Holder", str, int)


@dataclass(frozen=True, slots=True)
class GuardedPair:
    """One holder's layers at one guardian, and the way there."""

    holder: str
    guardian: str
    layers: tuple[int, ...]
    gradient_bytes: int
    """Gradients of one step."""
    bytes_per_s: int
    round_trip_ns: int

    @property
    def wait_ns(self) -> int:
        """How long a step would wait for the receipt of its gradients."""
        return duration_ns(self.gradient_bytes, self.bytes_per_s) + self.round_trip_ns

    @property
    def copy_ns(self) -> int:
        """Time until a copy of the states is there, by its share of the line."""
        size_bytes = STATE_PARTS * self.gradient_bytes * LINE_SHARE
        return duration_ns(size_bytes, self.bytes_per_s) + self.round_trip_ns


@dataclass(frozen=True, slots=True)
class CutPace:
    """How often cuts are taken in a view, and what going back to one may cost."""

    every_steps: int
    """The least number of steps between two cuts."""
    apart_steps: int
    """Steps between two cuts, as the lines are predicted: the next waits for the one before."""
    may_repeat_steps: int
    """Most steps that a failure may repeat, if lines and peers are as fast as predicted."""


def lags(waits_ns: Iterable[int], step_ns: int) -> bool:
    """Whether guardians lag: a step of `step_ns` would wait too long for one of them."""
    return any(wait_ns * LAGGING_STEP_SHARE > step_ns for wait_ns in waits_ns)


def has_room_for_cuts(own_bytes: Mapping[Holder, int], left_bytes: Mapping[Holder, int]) -> bool:
    """Whether each of several stage-holders has room for copies of its own layers, whose parameters
    take `own_bytes`; a lone one needs none."""
    copies = HELD_CUTS * STATE_PARTS
    return len(own_bytes) == 1 or all(
        copies * size <= left_bytes[holder] for holder, size in own_bytes.items()
    )


def pace_of(copies_ns: Iterable[int], most_bytes: int, step_ns: int) -> CutPace:
    """The pace of cuts whose copies travel for `copies_ns`; no peer copies more than `most_bytes`.

    It is Young's interval, within what a failure may cost: the steps since the cut, and those
    during which the next one travelled. Young's interval weighs lost time alone. But a small model
    on fast lines is copied in milliseconds, and everyone waits while steps are repeated. There cuts
    are taken as often as a hundredth of the time and of the lines allows.
    """
    step_ns = max(LEAST_STEP_NS, step_ns)
    copy_ns = max(copies_ns, default=0)
    limit_ns = max(LIMIT_NS, LIMIT_STEPS * step_ns)
    taken_ns = max(LEAST_CUT_NS, duration_ns(most_bytes, COPY_BYTES_PER_S))
    young_ns = math.isqrt(2 * taken_ns * FAILURE_EVERY_NS)
    cheap_ns = max(TRAINING_SHARE * taken_ns, TRAINING_SHARE // LINE_SHARE * copy_ns)
    between_ns = min(young_ns, cheap_ns, max(limit_ns // 2, limit_ns - copy_ns))
    every_steps = max(1, between_ns // step_ns)
    travels_steps = -(-copy_ns // step_ns) + 1
    apart_steps = max(every_steps, travels_steps)
    return CutPace(every_steps, apart_steps, apart_steps + travels_steps + 1)


class CutClock:
    """When cuts are taken in one view, at one of its members.

    `guarded`: the guardian of each layer that this peer alone holds. The view's first step is its
    first cut. The clock goes on in the next views, while all stay in their places.

    `has_stage`: whether this peer says itself what is kept. Another one goes by what stage-holders
    say: it may have come while a cut was under way, or not have heard of each commit.
    """

    def __init__(
        self, first_step: int, every_steps: int, guarded: Mapping[int, str], has_stage: bool = True
    ) -> None:
        self.every_steps = every_steps
        self.newest = first_step
        """The step of the cut under way, or of the newest one."""
        self.safe = -1
        """The step of the newest whole cut of this view; -1 for none."""
        self._guarded = guarded
        self._has_stage = has_stage
        self._missing = set(guarded)
        self._is_taken = False

    def is_due(self, step: int) -> bool:
        """Whether a copy of the states at `step` is to be taken and is not taken yet."""
        return step == self.newest and not self._is_taken

    def taken(self) -> None:
        """The copies of this peer's own layers are made."""
        self._is_taken = True

    def receipt(self, sender: str, step: int, layers: Iterable[int]) -> None:
        """`sender` has `layers` as of `step`."""
        if step == self.newest:
            self._missing -= {layer for layer in layers if self._guarded.get(layer) == sender}

    @property
    def missing(self) -> frozenset[int]:
        """Layers whose guardian does not have the newest cut yet."""
        return frozenset(self._missing)

    @property
    def travels(self) -> bool:
        """Whether copies are made and guardians wait for some of them."""
        return self._is_taken and bool(self._missing)

    @property
    def kept(self) -> int:
        """What Prepared says: the newest cut of which this peer's part is kept; -1 for none."""
        return self.newest if self._is_taken and not self._missing else self.safe

    def committed(self, step: int, kept: int) -> bool:
        """`step` is committed, and all stage-holders have kept the cut of step `kept`.

        Returns whether another cut is whole now.
        """
        is_news = kept > self.safe and (kept == self.newest or not self._has_stage)
        if is_news:
            self.safe = self.newest = kept
        if self.safe == self.newest and step + 1 >= self.newest + self.every_steps:
            self.newest, self._is_taken = step + 1, False
            self._missing = set(self._guarded)
        return is_news


def kept_by_all(kept: Iterable[int]) -> int:
    """The newest cut that all stage-holders have kept, from what their Prepared say."""
    return min(kept, default=-1)


def cuts_that_stay(steps: Iterable[int], safe: int) -> set[int]:
    """The cuts that a peer keeps of those it has: the newest whole one, as far as it knows, and
    those begun since, of which at most two may matter to others."""
    newer = sorted((step for step in steps if step >= safe), reverse=True)
    return {*newer[:HELD_CUTS], *(step for step in newer if step == safe)}
