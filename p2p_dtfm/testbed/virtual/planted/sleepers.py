"""Bugs in what a machine makes of its sleep, and what others make of it."""

from typing import Any

from p2p_dtfm.core.consensus.actions import Verdict, refused
from p2p_dtfm.core.consensus.parts.meeting import Meeting
from p2p_dtfm.core.liveness.waits import PossibleWaits
from p2p_dtfm.daemon.trainer.place import PlaceInView
from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.planted.bug import Planted
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIDS


def _waits_for_its_last_view(patches: Patches) -> None:
    def leave_views(place: Any) -> None:
        before = place._has_settled
        right(place)
        place._has_settled = before

    right = patches.put(PlaceInView, "leave_views", leave_views)


def _part_of_a_stage_tells_all(patches: Patches) -> None:
    def sees_to_the_end(possible: Any, one: str, other: str) -> bool:
        return other in possible._beside[one]

    patches.put(PossibleWaits, "sees_to_the_end", sees_to_the_end)


def _sleep_goes_unseen(patches: Patches) -> None:
    patches.put(now, "awake_or_asleep_s", now.monotonic_s)


def _who_went_on_is_gone(patches: Patches) -> None:
    """A peer that woke takes fellows that went on without it for gone, as if they were the
    fewer."""

    def hear_from_fellow(meeting: Any, view: Any, message: Any, now_ns: int) -> Verdict:
        if message.view.number <= view.id.number:
            return refused("the view is older")
        verdict: Verdict = meeting._go_on_without(message, "planted", now_ns)
        return verdict

    patches.put(Meeting, "_hear_from_fellow", hear_from_fellow)


SLEEPERS = (
    Planted(
        "waits-for-its-last-view",
        "who lost its place before its layers came brings none any more",
        _waits_for_its_last_view,
        LIDS,
    ),
    Planted(
        "part-tells-all",
        "who shares a part of another one's stage takes it to have computed all",
        _part_of_a_stage_tells_all,
        LIDS,
    ),
    Planted("sleep-unseen", "who has slept does not know", _sleep_goes_unseen, LIDS),
    Planted(
        "went-on-is-gone",
        "who wakes takes those that went on without it for gone",
        _who_went_on_is_gone,
        LIDS,
    ),
)
