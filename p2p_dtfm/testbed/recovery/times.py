"""How long each fault held up the next commit, and what all of them cost.

Faults that fall together hold up one another, so those that came alone are counted once more by
themselves. Where one begins after another's end, and steps came as usual again, what it holds up is
said of it alone. While no view has a plan, as where no side of a split has all layers, nothing can
be held up. After such a fault the time runs from its end.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

STEPS_AFTER_FAULT = 3
"""A fault may show itself some steps later: its stall is looked for among so many commits."""
USUAL_STEPS = 2
"""Within so many usual steps of the last commit nothing is held up."""

Event = dict[str, Any]
Histories = dict[str, list[Event]]
"""Each peer's events, in the order in which it wrote them."""
Commits = Sequence[tuple[int, float]]
"""Each step, and when the first peer had committed it, in seconds."""
Times = dict[str, dict[str, float]]
"""By kind of fault: `count`, `median` and `worst`, in seconds."""


@dataclass(frozen=True)
class Inflicted:
    """A fault as it really happened; times as in the histories, in seconds."""

    kind: str
    peers: tuple[str, ...]
    step: int
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class RecoveryTimes:
    all_s: Times
    alone_s: Times
    could_not_go_on: int


def steps_of(history: Sequence[Event]) -> list[Event]:
    return [event for event in history if event["event"] == "step" and event["loss"] is not None]


def views_of(histories: Histories) -> Histories:
    """The histories' views alone: each of a thousand faults looks for its own among them."""
    return {
        name: [event for event in history if event["event"] == "view"]
        for name, history in histories.items()
    }


def commits_of(histories: Histories) -> Commits:
    first: dict[int, float] = {}
    for history in histories.values():
        for event in steps_of(history):
            step = event["step"]
            first[step] = min(first.get(step, event["time_s"]), event["time_s"])
    ordered: list[tuple[int, float]] = []
    for step, time_s in sorted(first.items()):
        ordered.append((step, max(time_s, ordered[-1][1] if ordered else time_s)))
    return ordered


def usual_step_s(commits: Commits) -> float:
    return statistics.median(after[1] - before[1] for before, after in pairwise(commits))


def recovery_times(
    histories: Histories, commits: Commits, faults: Sequence[Inflicted]
) -> RecoveryTimes:
    usual_s = usual_step_s(commits)
    spans = [span_of(commits, fault) for fault in faults]
    all_s: dict[str, list[float]] = {}
    alone_s: dict[str, list[float]] = {}
    could_not_go_on, views = 0, views_of(histories)
    for fault, span in zip(faults, spans, strict=True):
        is_stuck = _nobody_had_a_plan(views, fault)
        could_not_go_on += is_stuck
        until_s = blamed_until_s(commits, fault, faults, usual_s)
        stall_s = longest_without_s(commits, fault.ended_s if is_stuck else fault.began_s, until_s)
        times_s = max(0.0, stall_s - usual_s)
        all_s.setdefault(fault.kind, []).append(times_s)
        together = sum(span[0] <= other[1] and other[0] <= span[1] for other in spans) > 1
        if not together and not is_stuck:
            alone_s.setdefault(fault.kind, []).append(times_s)
    return RecoveryTimes(_medians(all_s), _medians(alone_s), could_not_go_on)


def _medians(stalls_s: dict[str, list[float]]) -> Times:
    return {
        kind: {"count": len(times), "median": statistics.median(times), "worst": max(times)}
        for kind, times in sorted(stalls_s.items())
    }


def span_of(commits: Commits, fault: Inflicted) -> tuple[float, float]:
    """From the fault until some steps after its end: it may hold up commits for so long."""
    after_s = [time_s for _, time_s in commits if time_s > fault.ended_s]
    last_s = after_s[: STEPS_AFTER_FAULT + 1][-1] if after_s else commits[-1][1]
    return fault.began_s, max(fault.began_s, last_s)


def blamed_until_s(
    commits: Commits, fault: Inflicted, faults: Sequence[Inflicted], usual_s: float
) -> float:
    """Until when the fault may be to blame for missing commits: the end of its span, or when a
    later fault began after it, while steps came as usual again. A storm kills one daemon as soon as
    the last one is replaced."""
    until_s = span_of(commits, fault)[1]
    later_s = (other.began_s for other in faults if fault.ended_s < other.began_s < until_s)
    for began_s in sorted(later_s):
        before_s = (time_s for _, time_s in commits if fault.began_s < time_s <= began_s)
        if began_s - max(before_s, default=-math.inf) <= USUAL_STEPS * usual_s:
            return began_s
    return until_s


def longest_without_s(commits: Commits, from_s: float, to_s: float) -> float:
    """The longest time without a commit between these times: all of it, if it has no commit."""
    times_s = [from_s, *(time_s for _, time_s in commits if from_s < time_s <= to_s), to_s]
    return max(0.0, *(after - before for before, after in pairwise(times_s)))


def _nobody_had_a_plan(views: Histories, fault: Inflicted) -> bool:
    """Whether members agreed during the fault, and found each time that they cannot train."""
    told = [
        event
        for history in views.values()
        for event in history
        if fault.began_s < event["time_s"] < fault.ended_s
    ]
    return bool(told) and all("no_plan" in event for event in told)


def goodput_of(histories: Histories, commits: Commits) -> float:
    """The time that steps would take at their view's median, over the time that they took.

    The first step of a view bears what the change cost, so it does not count for the median. A view
    without another step is judged by what is usual in the run.
    """
    view_of: dict[int, Any] = {}
    for history in histories.values():
        for event in steps_of(history):
            view_of.setdefault(event["step"], event["view"])
    by_view: dict[Any, list[float]] = {}
    for before, after in pairwise(commits):
        by_view.setdefault(view_of[after[0]], []).append(after[1] - before[1])
    usual_s = usual_step_s(commits)
    undisturbed_s = sum(
        len(gaps) * statistics.median(gaps[1:] or [usual_s]) for gaps in by_view.values()
    )
    return min(1.0, undisturbed_s / (commits[-1][1] - commits[0][1]))
