"""A peer that has just woken knows that itself was away. It puts out nobody that stayed, and says
why it was gone.

By its own clock no time has passed, and nobody answers for the view in which it spoke a moment ago.
If it takes that for the others' end, a swarm is in two parts for a while. Mostly they meet again,
and nothing of what becomes of the run shows it.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.swarm import Swarm

JUST_S = 20.0
"""For so long, what it agrees on may come of its sleep."""
STAYED_S = 10.0
"""A peer that has been awake for so long was there before, and is in a view again."""
HEARS_S = 0.25
"""A peer that is alone since it was one of two may need so long to hear of a view that counts
more."""
SAYS_WITHIN_S = 30.0
"""Half as long as a daemon remembers that it slept. For so long it says that as the reason why
others went on without it."""
REJOINS, STOOD_STILL = "rejoins: ", "stood still"


class Wakers(logging.Handler):
    """Watches one seed, now and then, and hears what daemons log."""

    def __init__(self, swarm: Swarm, parted_s: Mapping[str, float]) -> None:
        """`parted_s` says until when anything but a lid kept each peer out of reach."""
        super().__init__(logging.WARNING)
        self._swarm = swarm
        self._parted_s = parted_s
        self._heard: dict[str, int] = {}
        """How many events of each peer were looked at."""
        self._problem = ""

    def look(self) -> str:
        """What a peer has made of its sleep, if that is wrong; else empty."""
        peers = [it for it in self._swarm.peers if it.is_running and it.process is not None]
        slept = [it for it in peers if it.process is not None and it.process.behind_ns]
        return self._problem or next(filter(None, map(self._puts_out, slept)), "")

    def _has_woken_within(self, peer: Peer, limit_s: float, at_s: float) -> bool:
        assert peer.process is not None
        woke_s = peer.process.woke_ns / 1e9
        return not peer.is_asleep and woke_s <= at_s <= woke_s + limit_s

    def _puts_out(self, peer: Peer) -> str:
        """Whom the peer puts out of a view in which it still is a while later. Where it was one of
        two it may be alone until it hears of the other's view."""
        events, last_s = peer.events(), self._swarm.now_s - HEARS_S
        first = self._heard.get(peer.name, 0)
        ripe = sum(event["at_s"] <= last_s for event in events)
        self._heard[peer.name] = ripe
        views = [event for event in events if event["event"] == "view"]
        for view in [it for it in events[first:ripe] if it["event"] == "view"]:
            before = [it for it in views if it["at_s"] < view["at_s"]]
            is_in_it = peer.view_id is not None and peer.view_id.number == view["view"]
            has_woken = self._has_woken_within(peer, JUST_S, view["at_s"])
            if not (before and is_in_it and has_woken):
                continue
            if out := ", ".join(self._stayed(peer, before[-1], view)):
                when = f"woke at {peer.awake_since_s:.2f} s, and at {view['at_s']:.2f} s"
                return f"{peer.name} {when} it is in view {view['view']}, which has {out} out"
        return ""

    def _stayed(self, peer: Peer, before: dict[str, Any], view: dict[str, Any]) -> list[str]:
        """Members that stayed all the time, were with it before, and are not now. Empty, unless
        these are more than are left, or as many that have come further: else the others' part may
        count."""
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
        counts = theirs > (len(view["members"]), peer.told_step())
        return [other.name for other in found] if found and counts else []

    def _is_reached(self, peer: Peer, other: Peer, at_s: float) -> bool:
        links, ways = self._swarm.network.links, (peer.peer_id, other.peer_id)
        parted_s = max(self._parted_s.get(it.name, 0.0) for it in (peer, other))
        if at_s - parted_s <= STAYED_S:
            return False
        return not any(links.of(*way).is_cut for way in (ways, ways[::-1]))

    # what it says --------------------------------------------------------------------------------

    def emit(self, record: logging.LogRecord) -> None:
        """The peer's user reads why the others have gone on without it."""
        process, said = PROCESS.get(), record.getMessage()
        if process is None or not process.behind_ns or not said.startswith(REJOINS):
            return
        awake_s = self._swarm.now_s - process.woke_ns / 1e9
        if awake_s <= SAYS_WITHIN_S and STOOD_STILL not in said:
            text = f"{process.name} woke {awake_s:.2f} s ago, and does not say so: {said}"
            self._problem = self._problem or text

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Meanwhile hears warnings, where somebody listens to them already."""
        log = logging.getLogger("p2p_dtfm")
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)
