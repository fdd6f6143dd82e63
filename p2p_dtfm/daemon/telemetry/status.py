"""What this daemon is doing: always one state, why, and how long it still takes."""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from p2p_dtfm.core.protocol.facts.in_words import counted, share_text
from p2p_dtfm.daemon.telemetry.estimate import Estimate, in_words
from p2p_dtfm.ports import now

FETCHES = "fetches"
TOLD_EVERY_S = 10.0
"""How often the log hears of something long."""
TROUBLES_LIMIT = 16

log = logging.getLogger("p2p_dtfm")


class Troubles:
    """What somebody must see to on this machine, from when it begins until it is over.

    Each has a name of its own, so that whoever told of it can say that it is over.
    """

    def __init__(self) -> None:
        self._present: dict[str, tuple[str, str]] = {}

    def tell(self, name: str, what: str, fix: str) -> None:
        """One sentence each: what is wrong, and what to do."""
        assert name in self._present or len(self._present) < TROUBLES_LIMIT, name
        self._present[name] = (what, fix)

    def over(self, name: str) -> None:
        self._present.pop(name, None)

    def named(self) -> tuple[tuple[str, str, str], ...]:
        """(name, what, fix), oldest first."""
        return tuple((name, what, fix) for name, (what, fix) in self._present.items())

    def present(self) -> tuple[tuple[str, str], ...]:
        """(what, fix), oldest first."""
        return tuple(self._present.values())


class Fetched:
    """Files that come at once are one task, from when the first begins until the last is there."""

    def __init__(self) -> None:
        self.came_bytes = 0
        """Since the first began, also of files that are there by now."""
        self._coming: dict[str, tuple[int, int]] = {}
        """By name: what is there of a file, and all of it."""

    @property
    def what(self) -> str:
        (name, *more) = self._coming
        return f"{FETCHES} {counted(1 + len(more), 'file') if more else name}"

    def comes(self, name: str, done_bytes: int, total_bytes: int) -> None:
        before, _ = self._coming.get(name, (done_bytes, total_bytes))
        self.came_bytes += max(0, done_bytes - before)  # a wrong file begins anew
        self._coming[name] = (done_bytes, total_bytes)

    def is_over(self, name: str) -> bool:
        """A file is there. Returns whether nothing comes any more."""
        self._coming.pop(name, None)
        return not self._coming

    def sums(self) -> tuple[int, int]:
        """Of the files that still come: what is there, and all."""
        done, total = zip(*self._coming.values(), strict=True)
        return sum(done), sum(total)


class State(StrEnum):
    STARTING = "starting"
    JOINING = "joining"
    MEASURING = "measuring"
    SYNCING = "syncing"
    WAITING = "waiting"
    SPARE = "spare"
    TRAINING = "training"
    DONE = "done"
    LEAVING = "leaving"
    PAUSED = "paused"
    STOPPED = "stopped"


LAST_STATES = (State.LEAVING, State.STOPPED)


@dataclass(frozen=True)
class LongTask:
    """How far something long is."""

    what: str
    share: float
    """0 to 1."""
    left_s: float | None
    """None while nothing can be said."""

    def __str__(self) -> str:
        left = "" if self.left_s is None else f", about {in_words(self.left_s)} left"
        share = share_text(self.share)
        return f"{self.what}{'' if share == '0%' else f': {share}'}{left}"


@dataclass
class Status:
    """`say` changes the state, `advance` says how far it is; the rest are facts that the parts of
    the daemon keep up to date.

    A peer that leaves goes on training until others hold its layers, but "leaving" is what its
    user waits for: after that state only the end is told.
    """

    state: State = State.STARTING
    reason: str = "loads the program"
    since_s: float = field(default_factory=now.wall_s)
    facts: dict[str, Any] = field(default_factory=dict)
    work: LongTask | None = None
    """Something long that is done in this state."""
    clock_s: Callable[[], float] = now.monotonic_s
    troubles: Troubles = field(default_factory=Troubles)
    measured: Callable[[], dict[str, Any]] = dict
    """Facts that change while nothing happens, such as the rate of a step that does not end."""
    _estimate: Estimate | None = None
    _fetched: Fetched = field(default_factory=Fetched)
    _told_s: float = 0.0
    _entered_s: float = 0.0

    def __post_init__(self) -> None:
        self._entered_s = self.clock_s()

    @property
    def in_state_s(self) -> float:
        """How long this state has lasted, whatever becomes of the wall clock. A machine without a
        clock of its own starts in 1970 and is told the time later, and one that sleeps waits for
        nobody."""
        return self.clock_s() - self._entered_s

    def say(self, state: State, reason: str) -> None:
        if state is not self.state or not self._is_fetching:
            self._end_work()
        self._enter(state, reason)

    def advance(self, state: State, what: str, done: float, total: float) -> None:
        """Something long has come so far, in any unit. It began when this was first said of it."""
        if self.work is None or self.work.what != what:
            self._end_work()
        self._enter(state, str(self._measure(what, done, total, done)))

    def _measure(self, what: str, done: float, total: float, did: float) -> LongTask:
        """`did` only grows: by it is judged how long the rest takes."""
        if self._estimate is None:
            self._estimate, self._told_s = Estimate(self.clock_s), self.clock_s()
        left_s = self._estimate.left_s(did, did + total - done)
        self.work = LongTask(what, min(1.0, done / max(total, 1)), left_s)
        if self.clock_s() - self._told_s >= TOLD_EVERY_S:
            self._told_s = self.clock_s()
            log.info("%s", self.work)
        return self.work

    @property
    def _is_fetching(self) -> bool:
        return self.work is not None and self.work.what.startswith(FETCHES)

    def _end_work(self) -> None:
        self.work = self._estimate = None
        self._fetched = Fetched()

    def receives(self, name: str, done_bytes: int, total_bytes: int) -> None:
        """A file is being fetched; state and reason stay. While training goes on, nobody waits for
        it. With `total_bytes` 0 it is over."""
        if self.state in (State.TRAINING, *LAST_STATES):
            return
        if total_bytes:
            if not self._is_fetching:
                self._end_work()
            self._fetched.comes(name, done_bytes, total_bytes)
        elif not self._is_fetching:
            return
        elif self._fetched.is_over(name):
            self._end_work()
            return
        self._measure(self._fetched.what, *self._fetched.sums(), self._fetched.came_bytes)

    def _enter(self, state: State, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        if self.state in LAST_STATES and state not in LAST_STATES:
            return
        changed = state is not self.state
        self.state, self.reason = state, reason
        if changed:
            self.since_s, self._entered_s = now.wall_s(), self.clock_s()
        log.log(logging.INFO if changed else logging.DEBUG, "%s: %s", state.value, reason)

    def as_json(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "reason": self.reason,
            "since_s": round(self.since_s, 3),
            "work": None if self.work is None else asdict(self.work),
            **self.figures(),
        }

    def figures(self) -> dict[str, Any]:
        """The facts, and what is measured now."""
        return {**self.facts, **self.measured()}
