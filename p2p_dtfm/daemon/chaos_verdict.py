"""What a run under faults was worth, read from the histories that its daemons wrote.

Checked: one plan for each view; each step's loss that of the undisturbed run; every step committed,
and none given up but by a split swarm. Measured: how long each fault held up the next commit.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

LOSS_TOLERANCE = 1e-4
STEPS_AFTER_FAULT = 3
"""A fault may show itself some steps later; its stall is looked for among so many commits."""

Event = dict[str, Any]
Histories = dict[str, list[Event]]
"""Of each peer, in the order in which it wrote them."""


@dataclass(frozen=True)
class Inflicted:
    """A fault as it really happened; times as in the histories, in seconds."""

    kind: str
    peers: tuple[str, ...]
    step: int
    began_s: float
    ended_s: float


@dataclass
class Verdict:
    violations: list[str] = field(default_factory=list)
    committed_steps: int = 0
    lost_samples: int = 0
    duplicated_samples: int = 0
    given_up_steps: int = 0
    """Commits that a split swarm's shorter side gave up when it healed; no fault of the run."""
    max_loss_difference: float | None = None
    """To the same run in one process; None where that cannot be compared."""
    recovery_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind of fault: the longest time without a commit, less a usual step; median and worst."""
    usual_step_s: float = 0.0
    goodput: float = 0.0
    """The time that the steps take without faults in each view, over the time they took."""
    views: int = 0
    kept_microbatches: int = 0
    """Of steps that failed, what stages had computed and did not compute again; one at one stage
    counts as one."""
    redone_microbatches: int = 0
    """And what was computed a second time, at least."""

    @property
    def ok(self) -> bool:
        return not self.violations


def judge(
    histories: Histories,
    inflicted: Iterable[Inflicted],
    total_steps: int,
    samples_per_step: int,
    expected_loss: Callable[[int], float] | None,
) -> Verdict:
    """`expected_loss(step)` is that of the undisturbed run."""
    faults = list(inflicted)
    verdict = Verdict()
    _check_plans(histories, verdict)
    _check_steps(histories, faults, total_steps, samples_per_step, verdict)
    if expected_loss is not None:
        _check_losses(histories, expected_loss, verdict)
    _measure(histories, faults, verdict)
    return verdict


def _steps(history: list[Event]) -> list[Event]:
    return [event for event in history if event["event"] == "step" and event["loss"] is not None]


def _check_plans(histories: Histories, verdict: Verdict) -> None:
    plans: dict[str, set[str]] = {}
    views: dict[str, Event] = {}
    for history in histories.values():
        for event in history:
            if event["event"] == "view":
                plans.setdefault(event["snapshot"], set()).add(event["plan"])
                views[event["snapshot"]] = event
    verdict.kept_microbatches = sum(e.get("kept_microbatches", 0) for e in views.values())
    verdict.redone_microbatches = sum(e.get("redone_microbatches", 0) for e in views.values())
    verdict.views = len(plans)
    for snapshot, digests in plans.items():
        if len(digests) > 1:
            verdict.violations.append(f"snapshot {snapshot[:12]} had {len(digests)} plans")


def _check_steps(
    histories: Histories,
    faults: list[Inflicted],
    total_steps: int,
    samples_per_step: int,
    verdict: Verdict,
) -> None:
    seen = {event["step"] for history in histories.values() for event in _steps(history)}
    missing = sorted(set(range(total_steps)) - seen)
    verdict.committed_steps = len(seen)
    verdict.lost_samples = len(missing) * samples_per_step
    if missing:
        verdict.violations.append(f"{len(missing)} steps were never committed, first {missing[0]}")
    was_split = any(fault.kind in ("partition", "cut") for fault in faults)
    for name, history in histories.items():
        counts = Counter(event["step"] for event in _steps(history))
        again = sorted(step for step, count in counts.items() if count > 1)
        if again and was_split:
            verdict.given_up_steps = max(verdict.given_up_steps, len(again))
        elif again:
            verdict.duplicated_samples += len(again) * samples_per_step
            verdict.violations.append(f"{name} committed step {again[0]} twice")


def _check_losses(
    histories: Histories, expected_loss: Callable[[int], float], verdict: Verdict
) -> None:
    worst, where = 0.0, ""
    for name, history in histories.items():
        for event in _steps(history):
            difference = abs(event["loss"] - expected_loss(event["step"]))
            if difference > worst:
                worst, where = difference, f"step {event['step']} at {name}"
    verdict.max_loss_difference = worst
    if worst > LOSS_TOLERANCE:
        verdict.violations.append(f"{where}: the loss is {worst:.2g} off the undisturbed run's")


def _measure(histories: Histories, faults: list[Inflicted], verdict: Verdict) -> None:
    commits = _commits(histories)
    if len(commits) < 2:
        return
    gaps_s = [after[1] - before[1] for before, after in pairwise(commits)]
    verdict.usual_step_s = statistics.median(gaps_s)
    verdict.goodput = _goodput(histories, gaps_s)
    stalls_s: dict[str, list[float]] = {}
    for fault in faults:
        stall_s = _stall_s(commits, fault) - verdict.usual_step_s
        stalls_s.setdefault(fault.kind, []).append(max(0.0, stall_s))
    verdict.recovery_s = {
        kind: {"count": len(times), "median": statistics.median(times), "worst": max(times)}
        for kind, times in sorted(stalls_s.items())
    }


def _commits(histories: Histories) -> list[tuple[int, float]]:
    """Each step, and when the first peer had committed it."""
    first: dict[int, float] = {}
    for history in histories.values():
        for event in _steps(history):
            step = event["step"]
            first[step] = min(first.get(step, event["time_s"]), event["time_s"])
    ordered: list[tuple[int, float]] = []
    for step, time_s in sorted(first.items()):
        ordered.append((step, max(time_s, ordered[-1][1] if ordered else time_s)))
    return ordered


def _stall_s(commits: list[tuple[int, float]], fault: Inflicted) -> float:
    """The longest time without a commit from the fault on, until some steps after its end."""
    last = max((n for n, (_, time_s) in enumerate(commits) if time_s <= fault.began_s), default=0)
    after_end = [n for n, (_, time_s) in enumerate(commits) if time_s > fault.ended_s]
    end = after_end[0] + STEPS_AFTER_FAULT if after_end else len(commits)
    times_s = [fault.began_s, *(time_s for _, time_s in commits[last + 1 : end + 1])]
    return max((after - before for before, after in pairwise(times_s)), default=0.0)


def _goodput(histories: Histories, gaps_s: list[float]) -> float:
    """Each step would take the median time of its view; what it took besides is lost."""
    view_of: dict[int, Any] = {}
    for history in histories.values():
        for event in _steps(history):
            view_of.setdefault(event["step"], event["view"])
    by_view: dict[Any, list[float]] = {}
    for step, gap_s in zip(sorted(view_of)[1:], gaps_s, strict=True):
        by_view.setdefault(view_of[step], []).append(gap_s)
    usual_s = sum(len(gaps) * statistics.median(gaps) for gaps in by_view.values())
    return min(1.0, usual_s / sum(gaps_s))
