"""Bugs in what a daemon tells its user. Nothing that becomes of the run shows them."""

from typing import Any

from p2p_dtfm.daemon.dashboard.observer import Observer
from p2p_dtfm.daemon.node.acquaintances import Acquaintances
from p2p_dtfm.daemon.node.coming_and_going.entry import Entry
from p2p_dtfm.daemon.telemetry.contribution import Contributions
from p2p_dtfm.daemon.telemetry.run_history import RunHistory
from p2p_dtfm.daemon.telemetry.status import Status, Troubles
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.planted.bug import Planted
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import (
    ABSENCES,
    MOMENTS,
    PARTINGS,
    QUICK_STORMS,
)


def _says_that_nobody_answers(patches: Patches) -> None:
    """Says that nobody answers, whatever became of its search."""

    async def find_others(entry: Any, pause_s: float) -> bool:
        found = bool(await right(entry, pause_s))
        if not found:
            acquaintances: Acquaintances = entry._membership.acquaintances
            acquaintances.say_nobody_answers(entry._membership.run.digest, pause_s)
        return found

    right = patches.put(Entry, "_find_others", find_others)


def _waits_for_those_of_before(patches: Patches) -> None:
    patches.nothing(Trainer, "_waits_for_nobody")


def _rate_stays(patches: Patches) -> None:
    patches.nothing(RunHistory, "left_views")


def _troubles_stay(patches: Patches) -> None:
    patches.nothing(Troubles, "over")


def _state_stays(patches: Patches) -> None:
    """A daemon that has trained says so for good."""

    def enter(status: Any, state: Any, reason: str) -> None:
        if status.state != "training" or state == "training":
            right(status, state, reason)

    right = patches.put(Status, "_enter", enter)


def _sends_more(patches: Patches) -> None:
    def committed(given: Any, step: int, sent_bytes: int, guarded_bytes: int) -> None:
        right(given, step, 9 * sent_bytes, guarded_bytes)

    right = patches.put(Contributions, "committed", committed)


def _hears_all(patches: Patches) -> None:
    def heard_s_ago(observer: Any, peer_ids: Any) -> tuple[float | None, ...]:
        return tuple(None if ago_s is None else 0.1 for ago_s in right(observer, peer_ids))

    right = patches.put(Observer, "heard_s_ago", heard_s_ago)


TOLD = (
    Planted(
        "nobody-answers",
        "who was let in while it looked says that nobody answers",
        _says_that_nobody_answers,
        ABSENCES,
    ),
    Planted("waits-for-gone", "who stops says on for whom", _waits_for_those_of_before, PARTINGS),
    Planted("rate-stays", "who is in no view tells of its rate", _rate_stays, PARTINGS),
    Planted("troubles-stay", "what is wrong is never over", _troubles_stay, QUICK_STORMS),
    Planted("trains-for-good", "who has trained says so for good", _state_stays, MOMENTS),
    Planted("sent-ninefold", "nine times what was sent is told", _sends_more, QUICK_STORMS),
    Planted("hears-all", "all are heard of just now", _hears_all),
)
