"""Problems that a daemon tells: each is real, and is no longer told once it is over."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from p2p_dtfm.daemon.node.acquaintances import NOBODY_ANSWERS
from p2p_dtfm.daemon.telemetry.problems import (
    LATE_S,
    LATE_STEPS,
    NO_STEPS,
    NOT_LET_IN,
    UNHEARD_S,
)
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.told.world import Falsehood, Truth, Word

BOUND_S = 4.0
QUIET_S = 0.4
"""A peer that fell silent was not heard for at least so long. Or its line broke, and nothing came
since."""
GOES_ON_S = 2.0
"""Steps of these runs take less."""
CAME_BACK_S = 20.0
"""For so long others may still call a peer silent that fell silent, and lives again."""
OVER_S = 20.0
"""For so long a daemon may still complain of a disk that takes files again. The next file shows it:
in these runs one comes with every step, or every tenth."""
STANDS_S = 60.0
"""A daemon that takes no step for so long says what is wrong, or what it waits for."""
OF_DISKS = ("history", "checkpoint", "life", "initial")


def wrong(word: Word, world: Truth) -> Iterator[Falsehood]:
    """Problems that are told and are not so, and a problem that is so and is not told."""
    for problem in word.live.problems:
        if problem.name == NO_STEPS:
            yield from _no_steps(word, world, problem.what)
        elif problem.name == NOT_LET_IN and word.view is not None:
            yield Falsehood("let in", f"says {problem.what}, and is in a view", BOUND_S)
        elif problem.name == NOBODY_ANSWERS and word.view is not None:
            yield Falsehood("answers", f"says {problem.what}, and is in a view", BOUND_S)
        elif problem.name in OF_DISKS:
            yield from _of_disks(word, world, problem.name, problem.what)
        elif problem.name == "data" and word.state == State.TRAINING:
            yield Falsehood("data", f"says {problem.what}, and takes steps", OVER_S)
    yield from _untold(word)


def _no_steps(word: Word, world: Truth, what: str) -> Iterator[Falsehood]:
    steps = _times_s(word.peer.events(), "step")
    if "no step was committed" in what and steps and word.now_s - steps[-1] < UNHEARD_S - 1:
        told = f"says {what}, and committed one {word.now_s - steps[-1]:.1f} s ago"
        yield Falsehood("no steps", told, 0.0)
    if "fell silent" in what:
        yield from _missing(word, world, what)


def _missing(word: Word, world: Truth, what: str) -> Iterator[Falsehood]:
    """Each peer that is named is gone, or some member has not heard it for a while, or it takes no
    steps of this view."""
    for peer_id in word.suspected:
        listeners = [it for it in word.status["members"] if it != peer_id]
        quiet_s = max((word.now_s - world.arrived_s(peer_id, it) for it in listeners), default=0.0)
        is_there = quiet_s < QUIET_S and world.awake_for_s(peer_id) > CAME_BACK_S
        if is_there and _goes_on(word, world.by_id[peer_id]):
            told = f"says {what}, and all hear {world.name(peer_id)}, which goes on"
            yield Falsehood(f"silent {peer_id}", told, BOUND_S)


def _times_s(events: Sequence[dict[str, Any]], kind: str) -> list[float]:
    """When a daemon's history has events of that kind, in their order."""
    return [it["at_s"] for it in events if it["event"] == kind]


def _goes_on(word: Word, other: Peer) -> bool:
    """The other has just committed a step of the view that this daemon is in."""
    events, view = other.events(), word.view
    views = [it for it in events if it["event"] == "view"]
    steps = _times_s(events, "step")
    is_with_it = bool(views) and view is not None and views[-1]["snapshot"] == view.id.snapshot
    return is_with_it and bool(steps) and word.now_s - steps[-1] < GOES_ON_S


def _of_disks(word: Word, world: Truth, name: str, what: str) -> Iterator[Falsehood]:
    """The disk refused something, and has since taken no file of that kind."""
    disk = word.peer.disk
    if disk.refused == 0:
        yield Falsehood(f"disk {name}", f"says {what}, and its disk has refused nothing", 0.0)
    elif not disk.is_full and _has_written(word, name, world.full_s.get(word.me, 0.0)):
        yield Falsehood(f"over {name}", f"says {what}, and its disk takes all", OVER_S)


def _has_written(word: Word, name: str, full_s: float) -> bool:
    """A file of that kind was due since."""
    assert word.participant is not None
    if name != "checkpoint":
        return word.state == State.TRAINING
    saves_at = word.participant.membership.run.spec.saves_at
    return word.state == State.TRAINING and any(
        it["event"] == "step" and it["at_s"] > full_s and saves_at(it["step"] + 1)
        for it in word.peer.events()
    )


def _untold(word: Word) -> Iterator[Falsehood]:
    """A daemon that should take steps, and takes none, says what is wrong."""
    is_in_steps = word.state in (State.TRAINING, State.WAITING) and word.view is not None
    if not is_in_steps or any(it.name == NO_STEPS for it in word.live.problems):
        return
    events = [it for it in word.peer.events() if it["at_s"] >= word.peer.started_s]
    steps = _times_s(events, "step")
    views = _times_s(events, "view")
    if not views or not steps:
        return
    usual_s = max((b - a for a, b in pairwise(steps[-6:])), default=0.0)
    predicted_s = word.plan.predicted_step_ns / 1e9 if word.plan is not None else 0.0
    late_s = max(LATE_S, LATE_STEPS * max(usual_s, predicted_s))
    said = f"says {word.state}: {word.reason}, and nothing is wrong"
    stood_s = word.now_s - max(steps[-1], word.peer.awake_since_s)  # its clock knows of no sleep
    since_s = min(stood_s, word.now_s - views[-1])
    if since_s > late_s + BOUND_S:
        yield Falsehood("untold", f"{said}; no step for {since_s:.0f} s", 0.0)
    elif stood_s > max(STANDS_S, 2 * late_s):
        yield Falsehood("untold for long", f"{said}; no step for {stood_s:.0f} s", 0.0)


def stands_still(words: list[Word], world: Truth) -> str:
    """What daemons say, if no step commits anywhere and nobody says what is wrong or what it waits
    for; empty otherwise."""
    if not words or world.is_complete:
        return ""
    says = [it for it in words if it.live.problems or it.state in _SAY_WHY]
    return "" if says else "; ".join(f"{it.peer.name} says {it.state}: {it.reason}" for it in words)


_SAY_WHY = (
    State.STARTING,
    State.JOINING,
    State.MEASURING,
    State.SYNCING,
    State.WAITING,
    State.PAUSED,
    State.LEAVING,
    State.STOPPED,
)
"""In these states the reason says what is waited for."""
