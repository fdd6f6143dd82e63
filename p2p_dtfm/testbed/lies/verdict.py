"""What came of a lie, and whether the design promises that of its kind."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.lies.kinds import LAYERS, Promise
from p2p_dtfm.testbed.recovery.times import Event, commits_of, steps_of, usual_step_s

STEPS_LOOKED_AT, FEW = 10, 5
FAIR_FACTOR = 2.0
"""Allows for what a step costs besides, on a machine that several daemons share."""
LEFT_OUT = re.compile(r"leaves out (?!one of )(\w+): ")
IN_DOUBT = re.compile(r"leaves out (?:one of|both) (\w+) and (\w+): ")


@dataclass
class LieVerdict:
    violations: list[str] = field(default_factory=list)
    """What is otherwise than the design promises."""
    steps: int = 0
    caught_after: dict[str, int | None] = field(default_factory=dict)
    """In which of its lying steps, counted from 1, each liar was out; None: it never was. Liars
    that had nothing to lie about are not in it."""
    lying_steps: dict[str, int] = field(default_factory=dict)
    """In how many steps each of these liars could lie."""
    had_no_work: list[str] = field(default_factory=list)
    """Liars that never had what they would lie about."""
    came_back: int = 0
    """How often a liar that was out got a place again."""
    barred: list[str] = field(default_factory=list)
    """Barred liars, by the word of the first daemon at the end."""
    false_bars: list[str] = field(default_factory=list)
    wrongly_left_out: list[str] = field(default_factory=list)
    """Honest members that were said to lie."""
    doubted: list[str] = field(default_factory=list)
    """Honest members that were one of two in doubt."""
    honest_out: list[str] = field(default_factory=list)
    """Honest members that had no place for a while."""
    views: int = 0
    """Views since the first lie. Each new view costs the open step a new beginning."""
    repeated_steps: int = 0
    """Committed steps that were given up, and computed again."""
    undone_steps: int = 0
    """Repeated steps that were undone because a liar had a hand in them, or may have had."""
    undo_limit: int = 0
    """How many steps may be undone for each liar; 0: none."""
    is_undone: bool = False
    """All that any liar had done was taken back."""
    usual_step_s: float | None = None
    held_up_s: float | None = None
    """The longest time without a commit since the first lie, less a usual step."""
    fair_from: int | None = None
    """From this step on, five steps take at most `FAIR_FACTOR` times as long as where each peer
    computes as much. None: there is no such step, or nobody has looked."""
    fair_step_s: float | None = None
    """How long a step takes where each peer computes as much."""
    first_steps_s: float | None = None
    last_steps_s: float | None = None
    """Medians of the last ten steps, and above of the first ten."""
    held_out_losses: dict[int, float] = field(default_factory=dict)
    """Held-out losses as the daemon shows them, by step."""
    max_loss_difference: float | None = None
    """The largest difference to an honest run in one process."""
    not_compared: str | None = None
    """Why losses were not compared; None: they were."""


def who_was_caught(
    history: Sequence[Event],
    liars: dict[str, str],
    from_step: int,
    verdict: LieVerdict,
    needs: str = LAYERS,
    every: int = 1,
) -> None:
    """Finds when each liar was out. `history` is an honest daemon's; `liars` are names by peer id;
    `needs` and `every` are those of a `LieKind`."""
    views = [event for event in history if event["event"] == "view"]
    reached = [_reached(view, history) for view in views]
    last = max((event["step"] for event in steps_of(history)), default=0)
    ends = [*reached[1:], max([last, *reached])]
    for peer_id, name in liars.items():
        there = [
            (step, peer_id in view["members"]) for step, view in zip(reached, views, strict=True)
        ]
        lying = {
            step
            for view, begin, end in zip(views, reached, ends, strict=True)
            if _has(needs, view, peer_id)
            for step in range(max(begin, from_step), end + 1)  # it was out in that very step
            if step % every == 0
        }
        if not lying:
            verdict.had_no_work.append(name)
            continue
        out = [step for step, is_there in there if not is_there and step >= min(lying)]
        count = sum(step <= out[0] for step in lying) if out else None
        verdict.caught_after[name] = count
        verdict.lying_steps[name] = len(lying)
        verdict.came_back += sum(
            not before and after for (_, before), (_, after) in pairwise(there)
        )


def _has(needs: str, view: Event, peer_id: str) -> bool:
    """Whether the peer had what a lie needs, in this view."""
    if peer_id not in view["members"] or not needs:
        return peer_id in view["members"]
    held = view.get("layers") or [None] * len(view["members"])  # without a plan
    layers = held[view["members"].index(peer_id)]
    if layers is None:
        return False
    return needs == LAYERS or layers[1] < max(stop for _, stop in filter(None, held))


def _reached(view: Event, history: Sequence[Event]) -> int:
    """The step that all had reached at the takeover. A view that undoes a liar's work begins
    earlier."""
    found = [it for it in history if it["event"] == "went back" and it["view"] == view["view"]]
    return int(found[0]["from_step"] if found else view["step"])


def what_was_undone(
    history: Sequence[Event], liars: dict[str, str], spec: RunSpec, verdict: LieVerdict
) -> None:
    """Reads from one honest daemon's history what was undone."""
    undoing = [event for event in history if event["event"] == "went back"]
    verdict.undone_steps = sum(it["from_step"] - it["step"] for it in undoing)
    if not spec.audit.undo_steps:
        return
    verdict.undo_limit = spec.audit.undo_steps + spec.audit.undo_every
    gone = {peer_id for it in undoing for peer_id in it["peers"]}
    within = [count for count in verdict.caught_after.values() if count is not None]
    in_time = all(count <= spec.audit.undo_steps for count in within)
    lied = {peer_id for peer_id, name in liars.items() if name not in verdict.had_no_work}
    verdict.is_undone = gone == lied and in_time and all(it["all_of_it"] for it in undoing)


def who_was_doubted(texts: Iterable[str], liars: Iterable[str], verdict: LieVerdict) -> None:
    """Reads from honest daemons' logs whom they left out, and whom they doubted."""
    said, lying = list(texts), set(liars)
    named = {peer_id for text in said for peer_id in LEFT_OUT.findall(text)}
    pairs = {peer for text in said for pair in IN_DOUBT.findall(text) for peer in pair}
    verdict.wrongly_left_out = sorted(named - lying)
    verdict.doubted = sorted(pairs - lying)


def who_is_barred(barred: Iterable[str], liars: dict[str, str], verdict: LieVerdict) -> None:
    found = set(barred)
    verdict.barred = sorted(liars[peer_id] for peer_id in found & liars.keys())
    verdict.false_bars = sorted(found - liars.keys())


def what_it_cost(
    history: Sequence[Event], honest: dict[str, str], from_step: int, verdict: LieVerdict
) -> None:
    """Reads the cost from one honest daemon's history. `honest` are names by peer id."""
    all_views = (event for event in history if event["event"] == "view")
    views = [view for view in all_views if _reached(view, history) >= from_step]
    verdict.views = len(views)
    verdict.honest_out = sorted(
        {name for it in views for peer, name in honest.items() if peer not in it["members"]}
    )
    steps = [it["step"] for it in steps_of(history)]
    verdict.repeated_steps = len(steps) - len(set(steps))
    told: list[dict[str, Any]] = [it for it in history if it["event"] == "step"]
    verdict.held_out_losses = {
        it["step"]: it["held_out_loss"] for it in told if it.get("held_out_loss") is not None
    }
    commits = commits_of({"": list(history)})
    if len(commits) > 1:
        verdict.usual_step_s = usual_s = usual_step_s(commits)
        gaps_s = [
            after[1] - before[1] for before, after in pairwise(commits) if after[0] >= from_step
        ]
        verdict.held_up_s = max(0.0, max(gaps_s, default=usual_s) - usual_s)


def when_it_was_fair(history: Sequence[Event], fair_s: float, verdict: LieVerdict) -> None:
    """Finds when steps became fair. `fair_s` is how long a step takes where each peer computes as
    much."""
    commits = commits_of({"": list(history)})
    took_s = [(after[0], after[1] - before[1]) for before, after in pairwise(commits)]
    if len(took_s) < 2 * STEPS_LOOKED_AT:
        return
    verdict.fair_step_s = fair_s
    verdict.first_steps_s, verdict.last_steps_s = (
        median(each for _, each in part)
        for part in (took_s[:STEPS_LOOKED_AT], took_s[-STEPS_LOOKED_AT:])
    )
    for at in range(len(took_s) - FEW + 1):
        if median(each for _, each in took_s[at : at + FEW]) <= FAIR_FACTOR * fair_s:
            verdict.fair_from = took_s[at][0]
            return


def judge(promise: Promise, within: int | None, tolerance: float, verdict: LieVerdict) -> None:
    """Adds what is otherwise than promised. `within` says in which of its lying steps a liar is out
    at the latest, at this rate of audits. `tolerance` is for losses, where none is to be wrong."""
    say = verdict.violations.append
    if verdict.had_no_work and not verdict.caught_after:
        say("no liar had work to lie about: play it again, or with more --peers")
    for name, count in verdict.caught_after.items():
        if within is None:
            continue
        if count is None and verdict.lying_steps.get(name, within + 1) <= within:
            continue  # it had no work any more before it was found
        if count is None:
            say(f"{name} lied to the end")
        elif count > within:
            say(f"{name} was caught in its lying step {count}, later than in the {within}.")
    if promise.barred:
        for name in sorted(set(verdict.caught_after) - set(verdict.barred)):
            say(f"{name} is not barred")
    _judge_times(promise, verdict)
    verdict.violations += _harm_to_honest(promise, verdict)
    verdict.violations += _undone_otherwise(promise, verdict)
    worst = verdict.max_loss_difference
    if worst is not None and not worst <= tolerance:
        say(f"the loss is {worst:.2g} off the honest run's")


def _harm_to_honest(promise: Promise, verdict: LieVerdict) -> Iterator[str]:
    for peers, what in (
        (verdict.wrongly_left_out, "called liars, and is not"),
        (verdict.false_bars, "barred for nothing"),
        (
            [] if promise.costs_another else verdict.honest_out,
            "out for a while, and has not lied (or was too slow)",
        ),
    ):
        if peers:
            yield f"{', '.join(peers)} {what}"


def _undone_otherwise(promise: Promise, verdict: LieVerdict) -> Iterator[str]:
    if verdict.repeated_steps > verdict.undone_steps:
        yield f"{verdict.repeated_steps - verdict.undone_steps} committed steps were undone"
    if promise.barred and verdict.undo_limit and not verdict.is_undone:
        yield "what a liar did was not undone, or not all of it"
    if verdict.undone_steps > verdict.undo_limit * len(verdict.caught_after):
        yield f"{counted(verdict.undone_steps, 'step')} undone, which is more than promised"


def _judge_times(promise: Promise, verdict: LieVerdict) -> None:
    """Judges whether steps were soon as fast as where each peer computes as much."""
    if promise.fair_within is None or verdict.fair_step_s is None:
        return
    fair_s, last_s = verdict.fair_step_s, verdict.last_steps_s or 0.0
    if verdict.fair_from is None or last_s > FAIR_FACTOR * fair_s:
        verdict.violations.append(
            f"steps take {last_s:.2f} s at the end, and {fair_s:.2f} s where all do as much"
        )
    elif verdict.fair_from > promise.fair_within:
        verdict.violations.append(
            f"steps were slow until step {verdict.fair_from}, not {promise.fair_within}"
        )
