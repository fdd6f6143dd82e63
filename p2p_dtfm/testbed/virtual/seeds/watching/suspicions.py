"""A peer that works is not held to be stuck: where machines only crash, or sleep, no peer is.

A peer that waits for ever is mostly thrown out in the end, and comes back. The run goes on, and its
outcome does not show that somebody waited.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from p2p_dtfm.core.liveness.stalls import Stalls
from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.swarm import Swarm

SETTLED_S = 10.0
"""Who began, woke or came back later may be meant as it was before. Nor is anybody meant before the
run's first step: a peer that is given none of the data, as its founder has died, cannot begin it.
Nor can a peer go on that lacks data and has a full disk."""


class Suspicions:
    """Watches one seed. `problem` says who was held to be stuck, by whom, and why."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self.problem = ""

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hears members that have waited for as long as they should. A member that joins another
        one's suspicion has waited half as long, and may be right about neither."""
        patches = Patches()

        def tick(stalls: Any, *args: Any) -> Any:
            found = ticks(stalls, *args)
            for suspicion in found:
                self._hear(suspicion.peer_id, suspicion.reason)
            return found

        ticks = patches.put(Stalls, "tick", tick)
        try:
            yield
        finally:
            patches.undo()

    def _hear(self, peer_id: str, reason: str) -> None:
        now_s, process = self._swarm.now_s, PROCESS.get()
        peer = next((it for it in self._swarm.peers if it.peer_id == peer_id), None)
        if peer is None or process is None or self.problem:
            return
        works = now_s - peer.awake_since_s >= SETTLED_S and not peer.disk.is_full
        if works and any(it.told_step() for it in self._swarm.peers if it.is_running):
            said = f"{now_s:.2f} s: {process.name} says of {peer.name} that it {reason}"
            self.problem = f"nothing is wrong with who is held to be stuck: {said}"
