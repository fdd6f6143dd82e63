"""Bugs that lose peers that nobody can call."""

from typing import Any

from p2p_dtfm.daemon.node.background.presence import PresenceKeeping
from p2p_dtfm.daemon.peers.reachability import ReachabilityService
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.planted.bug import Planted
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import ROUTERS


async def _nothing(owner: Any) -> None:
    """Does nothing, whatever becomes of the ways in."""


def _relays_are_not_replaced(patches: Patches) -> None:
    patches.put(ReachabilityService, "keep", _nothing)


def _others_are_not_told(patches: Patches) -> None:
    patches.put(PresenceKeeping, "keep_reachable", _nothing)


WAYS = (
    Planted(
        "relays-kept",
        "who has lost its relays takes no others",
        _relays_are_not_replaced,
        ROUTERS,
    ),
    Planted(
        "way-untold",
        "others do not hear that somebody is reached another way",
        _others_are_not_told,
        ROUTERS,
    ),
)
