"""What a run under faults was worth, read from the histories that its daemons wrote.

Checked: each view has one plan; each step's loss is the undisturbed run's; every step is committed,
and none twice in the lineage that stays. Steps may be given up in two cases only. One side of a
split may give up steps as both meet again, where the other side stays (`_gave_up`). Where guardians
lagged, steps since the newest whole cut may be lost, but no more than was said. Measured: how long
each fault held up the next commit.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from p2p_dtfm.core.cost_model.cuts import LIMIT_NS, LIMIT_STEPS
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.testbed.recovery.phases import recovery_phases
from p2p_dtfm.testbed.recovery.times import (
    Event,
    Histories,
    Inflicted,
    commits_of,
    goodput_of,
    recovery_times,
    steps_of,
    usual_step_s,
)

LOSS_TOLERANCE = 1e-4
SPLITS = ("partition", "cut")
MERGED_WITHIN_S = 90.0
"""After a split's end. So long a run may take at most for each fault."""
UNDER_WAY_S = 2.0
"""The commit of the step under way may have reached one side only. It came at most so long before
the split."""


@dataclass
class ChaosVerdict:
    violations: list[str] = field(default_factory=list)
    committed_steps: int = 0
    lost_samples: int = 0
    duplicated_samples: int = 0
    not_looked_at: list[str] = field(default_factory=list)
    given_up_steps: int = 0
    """The most commits that one side of a split gave up as both met again. It is no fault of the
    run."""
    repeated_steps: int = 0
    """The most steps by which one failure set training back, to the newest whole cut."""
    max_loss_difference: float | None = None
    """The largest difference to the same run in one process; None if that cannot be compared."""
    recovery_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """By kind of fault: the longest time without a commit, less a usual step; median and worst."""
    recovery_alone_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same for faults that no other fault fell together with, and during which some peers could
    go on."""
    recovery_phases_s: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    """By kind of fault, where that time went: each phase's `count`, `median` and `worst`."""
    could_not_go_on: int = 0
    """Faults during which nobody had a plan, as where no side of a split has all layers."""
    usual_step_s: float = 0.0
    goodput: float = 0.0
    """The time that steps take without faults in each view, over the time that they took."""
    views: int = 0
    kept_microbatches: int = 0
    """What stages had computed of failed steps, and did not compute again. A microbatch at one
    stage counts as one."""
    redone_microbatches: int = 0
    """At least so many were computed a second time."""

    @property
    def ok(self) -> bool:
        return not self.violations


def judge(
    histories: Histories,
    inflicted: Iterable[Inflicted],
    total_steps: int,
    samples_per_step: int,
    expected_loss: Callable[[int], float] | None,
    ends_s: float = math.inf,
) -> ChaosVerdict:
    """`expected_loss(step)` is that of the undisturbed run. At `ends_s` all are told to leave: from
    then on fewer and fewer compute, and no fault is to blame for slow steps."""
    faults = list(inflicted)
    verdict = ChaosVerdict()
    _check_plans(histories, verdict)
    _check_steps(histories, total_steps, samples_per_step, verdict)
    _check_repeats(histories, faults, samples_per_step, verdict)
    if expected_loss is not None:
        _check_losses(histories, expected_loss, verdict)
    _measure(histories, faults, ends_s, verdict)
    return verdict


def _check_plans(histories: Histories, verdict: ChaosVerdict) -> None:
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
    histories: Histories, total_steps: int, samples_per_step: int, verdict: ChaosVerdict
) -> None:
    seen = {step for history in histories.values() for step in _standing(history)}
    missing = sorted(set(range(total_steps)) - seen)
    verdict.committed_steps = len(seen)
    verdict.lost_samples = len(missing) * samples_per_step
    if missing:
        verdict.violations.append(
            f"{counted(len(missing), 'step')} never committed, first {missing[0]}"
        )


def _standing(history: Iterable[Event]) -> set[int]:
    """The steps that a peer had committed in the end, without those that a view took back, if it
    never did them again. One that died before it met the others took nothing back."""
    stand: set[int] = set()
    for event in history:
        if event["event"] == "view":
            stand = {step for step in stand if step < event.get("step", math.inf)}
        elif event["event"] == "step" and event["loss"] is not None:
            stand.add(event["step"])
    return stand


@dataclass(frozen=True)
class _Entrance:
    """A peer's entry into a view."""

    view: Event
    came_from: str
    """The snapshot of the peer's view before."""
    back: dict[int, float]
    """Steps that the peer had committed and now goes back by, with the times of their commits."""
    has_trained: bool
    is_promised: bool
    """Guardians lagged: the views before have said that a failure may cost steps. What was told to
    be safe stays."""
    may_repeat: int
    """How many steps they said it may cost."""


def _check_repeats(
    histories: Histories,
    faults: Sequence[Inflicted],
    samples_per_step: int,
    verdict: ChaosVerdict,
) -> None:
    entrances = {name: list(_entrances(history)) for name, history in histories.items()}
    splits = [fault for fault in faults if fault.kind in SPLITS]
    for name, history in histories.items():
        counts = Counter(event["step"] for event in steps_of(history))
        for entrance in entrances[name]:
            if any(_gave_up(name, entrance, entrances, split) for split in splits):
                verdict.given_up_steps = max(verdict.given_up_steps, len(entrance.back))
            elif entrance.is_promised:
                _check_promise(name, entrance, verdict)
            else:
                continue
            counts -= Counter(entrance.back.keys())
        again = sorted(step for step, count in counts.items() if count > 1)
        if again and _has_full_disk(name, history, again, faults):
            verdict.not_looked_at.append(f"steps committed twice at {name}")
        elif again:
            verdict.duplicated_samples += len(again) * samples_per_step
            verdict.violations.append(f"{name} committed step {again[0]} twice")


def _entrances(history: list[Event]) -> Iterator[_Entrance]:
    seen: dict[int, float] = {}
    safe, may_repeat, came_from = 0, None, ""
    for event in history:
        if event["event"] == "step" and event["loss"] is not None:
            seen[event["step"]] = event["time_s"]
            safe = max(safe, event.get("safe_step") or 0)
        if event["event"] != "view":
            continue
        begins, has_trained = event.get("step", 0), bool(seen)
        back = {step: at_s for step, at_s in seen.items() if step >= begins}
        is_promised = bool(back) and may_repeat is not None and begins >= safe
        yield _Entrance(event, came_from, back, has_trained, is_promised, may_repeat or 0)
        for step in back:
            del seen[step]
        safe, came_from = min(safe, begins), event["snapshot"]
        may_repeat = _repeatable_steps(event, may_repeat)


def _gave_up(
    name: str, entrance: _Entrance, entrances: dict[str, list[_Entrance]], split: Inflicted
) -> bool:
    """Whether the peer gave up what it had done since the split began. It must have come to a view
    in which others stayed that shared no view with it since. A split that is mended only as all
    leave has no end before that."""
    back, met_s = entrance.back, entrance.view["time_s"]
    is_for_good = split.ended_s <= split.began_s
    if not back or not (is_for_good or met_s <= split.ended_s + MERGED_WITHIN_S):
        return False
    under_way = min(back)
    for step, at_s in back.items():
        if at_s < split.began_s - (UNDER_WAY_S if step == under_way else 0.0):
            return False
    mine = _views_between(entrances[name], split.began_s, met_s)
    return any(
        other != name
        and _has_stayed(entrance, theirs)
        and not mine & _views_between(theirs, split.began_s, met_s) - {entrance.view["snapshot"]}
        for other, theirs in entrances.items()
    )


def _has_stayed(entrance: _Entrance, theirs: Iterable[_Entrance]) -> bool:
    """Whether the other came to that view from another view, and with all that it had committed."""
    return any(
        it.view["snapshot"] == entrance.view["snapshot"]
        and it.came_from != entrance.came_from
        and it.has_trained
        and not it.back
        for it in theirs
    )


def _views_between(entrances: Iterable[_Entrance], from_s: float, to_s: float) -> set[str]:
    views = (it.view for it in entrances)
    return {view["snapshot"] for view in views if from_s <= view["time_s"] <= to_s}


def _check_promise(name: str, entrance: _Entrance, verdict: ChaosVerdict) -> None:
    """Checks steps that a view repeats after the loss of a peer whose guardians lagged, against
    what was said."""
    back, said = entrance.back, entrance.may_repeat
    took_s = max(back.values()) - min(back.values())
    verdict.repeated_steps = max(verdict.repeated_steps, len(back))
    if len(back) > max(said, LIMIT_STEPS) and took_s > LIMIT_NS / 1e9:
        verdict.violations.append(
            f"{name}: view {entrance.view['view']} repeats {counted(len(back), 'step')}, "
            f"{took_s:.0f} s of them, where {said} were said"
        )


def _repeatable_steps(view: Event, before: int | None) -> int | None:
    """How many steps a failure may cost. While layers are lost, what the view before said
    stands."""
    return before if "no_plan" in view else view.get("may_repeat_steps")


def _has_full_disk(
    name: str, history: list[Event], again: Sequence[int], faults: Sequence[Inflicted]
) -> bool:
    """Whether the peer's disk was full between the first and the last commit of each of these
    steps. Then it may have failed to write which view took the step back."""
    full = [it for it in faults if it.kind == "disk full" and name in it.peers]
    times_s: dict[int, list[float]] = {}
    for event in steps_of(history):
        times_s.setdefault(event["step"], []).append(event["time_s"])
    return all(
        any(it.began_s <= max(times_s[step]) and min(times_s[step]) <= it.ended_s for it in full)
        for step in again
    )


def _check_losses(
    histories: Histories, expected_loss: Callable[[int], float], verdict: ChaosVerdict
) -> None:
    worst, where = 0.0, ""
    no_number = ""
    for name, history in histories.items():
        for event in steps_of(history):
            what = f"step {event['step']} at {name}"
            if not math.isfinite(event["loss"]):
                no_number = no_number or what
                continue
            difference = abs(event["loss"] - expected_loss(event["step"]))
            if difference > worst:  # false where the step was not computed beside it: NaN
                worst, where = difference, what
    verdict.max_loss_difference = worst
    if no_number:
        verdict.violations.append(f"{no_number}: the loss is no number")
    if worst > LOSS_TOLERANCE:
        verdict.violations.append(f"{where}: the loss is {worst:.2g} off the undisturbed run's")


def _measure(
    histories: Histories, faults: list[Inflicted], ends_s: float, verdict: ChaosVerdict
) -> None:
    commits = [commit for commit in commits_of(histories) if commit[1] <= ends_s]
    if len(commits) < 2:
        return
    verdict.usual_step_s = usual_step_s(commits)
    verdict.goodput = goodput_of(histories, commits)
    found = recovery_times(histories, commits, faults)
    verdict.recovery_s, verdict.recovery_alone_s = found.all_s, found.alone_s
    verdict.recovery_phases_s = recovery_phases(histories, commits, faults)
    verdict.could_not_go_on = found.could_not_go_on
