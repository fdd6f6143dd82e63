"""Which of the things that a page shows are worth interrupting somebody for.

These are: a problem that lasts, once; that it is over, if it was told; a loss that rises for long;
a disk that is nearly full; and the end, whatever it is.
"""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.web.state import DashboardState

LASTS_S = 60.0
"""A problem that lasts so long is told. It is over when it has been gone for as long."""
RISES_FOR_S = 600.0
LEAST_LOSSES = 30
LEAST_DISK_BYTES = 1 << 30
PROBLEMS_LIMIT = 16
LOSS = "loss"
SEES_LOSSES = (State.TRAINING, State.SPARE)
"""In other states this peer may see no losses: one that has risen has not fallen for all it
knows."""
SHOWS_WHAT_IS_OVER = (State.SYNCING, State.TRAINING, State.SPARE, State.DONE)
"""In other states a daemon may not see any more what was wrong: it has been left out, or leaves."""


@dataclass(frozen=True)
class Notice:
    """A title and a sentence or two, for somebody far from this machine."""

    kind: str
    """"problem", "over" or "end"."""
    title: str
    text: str


@dataclass
class _Lasting:
    what: str
    fix: str
    since_s: float
    seen_s: float
    unseen_s: float = -math.inf
    """When it last could not be seen, though it may have lasted."""
    is_told: bool = False


class Watch:
    """Gets what a page shows, in order of time; gives what is to be told."""

    def __init__(self) -> None:
        self._problems: dict[str, _Lasting] = {}
        self._has_told_end = False

    def look(self, state: DashboardState, free_bytes: int, now_s: float) -> list[Notice]:
        """`free_bytes`: on the home's disk. `now_s`: by a clock that never goes back."""
        run = state.run.name if state.run is not None else "p2p-dtfm"
        for name, what, fix, lasts_s in _wrong(state, free_bytes):
            if name not in self._problems and len(self._problems) < PROBLEMS_LIMIT:
                self._problems[name] = _Lasting(what, fix, now_s + lasts_s - LASTS_S, now_s)
            if name in self._problems:
                found = self._problems[name]
                found.what, found.fix, found.seen_s = what, fix, now_s
        for name, found in self._problems.items():
            shows = SEES_LOSSES if name == LOSS else SHOWS_WHAT_IS_OVER
            if found.is_told and state.live.state not in shows:
                found.unseen_s = now_s
        return [*self._told(run, now_s), *self._end_of(state, run)]

    def _told(self, run: str, now_s: float) -> Iterator[Notice]:
        for name, it in list(self._problems.items()):
            if it.seen_s == now_s and not it.is_told and now_s - it.since_s >= LASTS_S:
                it.is_told = True
                text = f"{it.what}. What helps: {it.fix}"
                yield Notice("problem", f"{run}: something is wrong", text)
            elif it.seen_s < now_s and not it.is_told:
                del self._problems[name]
            elif now_s - max(it.seen_s, it.unseen_s) >= LASTS_S:
                del self._problems[name]
                yield Notice("over", f"{run}: it is over", it.what)

    def _end_of(self, state: DashboardState, run: str) -> Iterator[Notice]:
        if state.live.state == State.DONE and not self._has_told_end:
            self._has_told_end = True
            loss = state.live.held_out_loss
            held_out = "" if loss is None else f", held-out loss {loss:.3f}"
            given = f"; {counted(state.contribution.ever.tokens, 'token')} from this computer"
            steps = counted(state.live.step, "step")
            yield Notice("end", f"{run} is complete", f"{steps}{held_out}{given}. Thank you.")

    def held_up(self, state: DashboardState, cause: str) -> Notice:
        """The daemon would take part again, and cannot for now."""
        run = state.run.name if state.run is not None else "p2p-dtfm"
        return Notice("problem", f"{run}: something is wrong", cause)

    def ended(self, state: DashboardState, cause: str) -> Notice:
        """The daemon ends by itself for this cause, whatever it was told to do."""
        run = state.run.name if state.run is not None else "p2p-dtfm"
        return Notice("end", f"{run}: this computer takes part no more", cause)


def _wrong(state: DashboardState, free_bytes: int) -> Iterator[tuple[str, str, str, float]]:
    """For each thing that is wrong: a name that stays the same while it lasts, what it is, its fix,
    and how long it must last."""
    for problem in state.live.problems:
        name = problem.name or re.sub(r"\d+", "", problem.what)
        yield name, problem.what, problem.fix, LASTS_S
    if state.live.state in SEES_LOSSES and _rises(state.history.loss):
        fix = "the founder may look at the learning rate of the run, and at its data"
        yield LOSS, "the loss has been rising for ten minutes", fix, RISES_FOR_S
    if free_bytes < LEAST_DISK_BYTES:
        what = f"less than {bytes_text(LEAST_DISK_BYTES)} of disk is left"
        yield "disk", what, "make room, or give it less: --disk-gib", 0.0


def _rises(losses: Sequence[float]) -> bool:
    """Whether the mean of the newest third is above that of as many before, by more than twice the
    standard error of the difference. The page says "it rises" of the same."""
    window = max(10, len(losses) // 3)
    if len(losses) < max(LEAST_LOSSES, 2 * window):
        return False
    before, newest = losses[-2 * window : -window], losses[-window:]
    variance = statistics.variance(before) + statistics.variance(newest)
    error = math.sqrt(variance / window)
    return statistics.fmean(newest) - statistics.fmean(before) > 2 * error
