"""Where the time of each recovery went, by what the survivors noted of the view that followed.

A phase ends when the last survivor has come so far, since the step waits for all. Only the stop
counts at the first survivor, which tells the others. Some faults have no phases: no step was
stopped for as long as they may hold up commits, or no view followed before the next commit.
"""

import statistics
from collections.abc import Iterable, Sequence

from p2p_dtfm.testbed.recovery.times import (
    Commits,
    Event,
    Histories,
    Inflicted,
    Times,
    blamed_until_s,
    span_of,
    steps_of,
    usual_step_s,
    views_of,
)

PHASES = ("suspected", "gathered", "planned", "taken over", "first step", "repeated")
"""Each phase begins at the end of the one before, the first at the fault. The first step ends with
the first commit in the view. The last phase ends with the commit of a step that nobody had
committed before. Between the two are the steps since a cut, where guardians lag."""


def recovery_phases(
    histories: Histories, commits: Commits, faults: Sequence[Inflicted]
) -> dict[str, Times]:
    """`count`, `median` and `worst` in seconds, by kind of fault and by phase."""
    found: dict[str, dict[str, list[float]]] = {}
    noted, usual_s = _Noted(histories), usual_step_s(commits)
    for fault in faults:
        until_s = blamed_until_s(commits, fault, faults, usual_s)
        for phase, time_s in _phases(noted, commits, fault, until_s).items():
            found.setdefault(fault.kind, {}).setdefault(phase, []).append(time_s)
    return {
        kind: {
            phase: {
                "count": len(times_s),
                "median": statistics.median(times_s),
                "worst": max(times_s),
            }
            for phase, times_s in phases.items()
        }
        for kind, phases in sorted(found.items())
    }


def phases_of(histories: Histories, commits: Commits, fault: Inflicted) -> dict[str, float]:
    """One fault's phases in seconds. Together they last from the fault to the next commit of a new
    step."""
    return _phases(_Noted(histories), commits, fault, span_of(commits, fault)[1])


class _Noted:
    """What histories say of views, read once for all faults."""

    def __init__(self, histories: Histories) -> None:
        self.views = views_of(histories)
        self.commits_s: dict[int, list[float]] = {}
        """When each peer committed each step, by the view's number."""
        for history in histories.values():
            for event in steps_of(history):
                self.commits_s.setdefault(event["view"], []).append(event["time_s"])


def _phases(noted: _Noted, commits: Commits, fault: Inflicted, until_s: float) -> dict[str, float]:
    views = _views_after(noted.views, fault, until_s)
    ends_s = _ends_s(views)
    new_s = [time_s for _, time_s in commits if ends_s and time_s > ends_s[-1]][:1]
    if not new_s:
        return {}
    since_s = ends_s[-1]
    in_view_s = [it for it in noted.commits_s.get(views[0]["view"], []) if it > since_s]
    ends_s += [min([*new_s, *in_view_s]), *new_s]
    begins_s = [fault.began_s, *ends_s]
    return {
        phase: max(0.0, end_s - begin_s)
        for phase, begin_s, end_s in zip(PHASES, begins_s, ends_s, strict=False)
    }


def _ends_s(views: Sequence[Event]) -> list[float]:
    """Ends of the phases up to the takeover: when the last peer had come so far."""
    if not views:
        return []
    return [
        min(view["stopped_s"] for view in views),
        max(view["gathered_s"] for view in views),
        max(view["planned_s"] for view in views),
        max(view["time_s"] for view in views),
    ]


def _views_after(histories: Histories, fault: Inflicted, until_s: float) -> list[Event]:
    """What each survivor wrote of the first view for which a step was stopped between the fault and
    `until_s`. A later stop was another fault's doing."""
    marked = [
        event
        for name, history in histories.items()
        if name not in fault.peers
        for event in history
        if fault.began_s <= event.get("stopped_s", 0.0) <= until_s
    ]
    marked = list(_whole(marked))
    if not marked:
        return []
    first = min(marked, key=lambda event: float(event["time_s"]))
    return [event for event in marked if event["snapshot"] == first["snapshot"]]


def _whole(views: Iterable[Event]) -> Iterable[Event]:
    return (view for view in views if "gathered_s" in view and "planned_s" in view)
