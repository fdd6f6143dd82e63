"""Who has just woken was the one that was away: it has nobody out who stayed, and says what it was.

By its own clock no time has passed, and nobody answers in whose name it spoke a moment ago. If it
takes that for the others' end, a swarm is in two parts for a while; mostly they meet again, and
nothing of what becomes of the run shows it.
"""

from collections.abc import Mapping
from typing import Any

from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.swarm import Swarm

JUST_S = 20.0
"""So long what it agrees on may come of its sleep."""
STAYED_S = 10.0
"""Who is awake for so long was there before it, and is in a view again."""
SAYS_WITHIN_S = 30.0
"""Why others have gone on without it is half as long, then, as a daemon remembers that it slept."""
REJOINS, STOOD_STILL = "rejoins: ", "stood still"


class Wakers:
    """Of one seed, looked at now and then."""

    def __init__(self, swarm: Swarm, parted_s: Mapping[str, float]) -> None:
        """`parted_s`: until when something but a lid kept each out of reach."""
        self._swarm = swarm
        self._parted_s = parted_s
        self._heard: dict[str, int] = {}
        """So many events of each were looked at."""
        self._said: dict[str, str] = {}
        """How each stood at the last look."""

    def look(self) -> str:
        """What somebody has made of its sleep, if that is wrong."""
        peers = [it for it in self._swarm.peers if it.is_running and it.process is not None]
        slept = [it for it in peers if it.process is not None and it.process.behind_ns]
        problems = (self._puts_out(it) or self._is_silent(it) for it in slept)
        return next(filter(None, problems), "")

    def _has_woken_within(self, peer: Peer, limit_s: float, at_s: float) -> bool:
        assert peer.process is not None
        woke_s = peer.process.woke_ns / 1e9
        return not peer.is_asleep and woke_s <= at_s <= woke_s + limit_s

    def _puts_out(self, peer: Peer) -> str:
        events = peer.events()
        first, self._heard[peer.name] = self._heard.get(peer.name, 0), len(events)
        views = [event for event in events if event["event"] == "view"]
        for view in [it for it in events[first:] if it["event"] == "view"]:
            before = [it for it in views if it["at_s"] < view["at_s"]]
            if not before or not self._has_woken_within(peer, JUST_S, view["at_s"]):
                continue
            if out := ", ".join(self._stayed(peer, before[-1], view)):
                when = f"woke at {peer.awake_since_s:.2f} s, and at {view['at_s']:.2f} s"
                return f"{peer.name} {when} it is in view {view['view']}, which has {out} out"
        return ""

    def _stayed(self, peer: Peer, before: dict[str, Any], view: dict[str, Any]) -> list[str]:
        """Who was with it before, is not now, and was there all the time; nobody where these are
        fewer than are left, or have come less far: then the others' part counts."""
        out = set(before["members"]) - set(view["members"])
        found = [
            other
            for other in self._swarm.peers
            if other.peer_id in out
            and view["at_s"] - other.awake_since_s > STAYED_S
            and other.is_in_a_view
            and self._is_reached(peer, other, view["at_s"])
        ]
        theirs = len(found), max((other.told_step() for other in found), default=0)
        counts = theirs >= (len(view["members"]), peer.told_step())
        return [other.name for other in found] if found and counts else []

    def _is_reached(self, peer: Peer, other: Peer, at_s: float) -> bool:
        links, ways = self._swarm.network.links, (peer.peer_id, other.peer_id)
        parted_s = max(self._parted_s.get(it.name, 0.0) for it in (peer, other))
        if at_s - parted_s <= STAYED_S:
            return False
        return not any(links.of(*way).is_cut for way in (ways, ways[::-1]))

    def _is_silent(self, peer: Peer) -> str:
        """Its user reads why the others have gone on without it."""
        before, self._said[peer.name] = self._said.get(peer.name, ""), peer.standing()
        said = self._said[peer.name]
        is_new = said != before and REJOINS in said and STOOD_STILL not in said
        if is_new and self._has_woken_within(peer, SAYS_WITHIN_S, self._swarm.now_s):
            return f"{peer.name} woke at {peer.awake_since_s:.2f} s, and does not say so: {said}"
        return ""
