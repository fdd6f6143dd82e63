"""Which lane goes first where several have something to send.

Activations and their gradients hold up computing, parameter gradients the end of a step, and state
nobody. Lanes to one peer share its link. Lanes to all peers share this host's uplink, where it is
known to be limited. A lane gives way before each piece that it writes, but not for ever. So a slow
link holds up others for a moment only, and nothing starves.

Bytes that are written have not left. Buffers take a small frame at once, and many streams of
another lane would then have most of the link. So a lane keeps its place for as long as its bytes
take to leave.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator

from p2p_dtfm.ports import now

RANKS = {"forward": 0, "backward": 0, "reduce": 1, "state": 2}
"""The rank of each lane. The lower goes first."""
GIVE_WAY_S = 0.2
"""The longest that a lane gives way before each piece."""
LEAVES_LIMIT_S = 1.0
"""The longest that bytes count as leaving, because an estimated rate may be wrong."""


class LanePriority:
    """One for all lanes of a host. `shares_uplink` may change at any time."""

    def __init__(self) -> None:
        self.shares_uplink = False
        self._writing: dict[tuple[str, int], int] = {}
        self._leaving: dict[tuple[str, int], float] = {}
        """By peer and rank: until when written bytes are still leaving here."""
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def taken(self, peer_id: str, lane: str) -> Iterator[None]:
        """Keep this lane's place while it has something to write."""
        key = (peer_id, RANKS[lane])
        self._writing[key] = self._writing.get(key, 0) + 1
        try:
            yield
        finally:
            self._writing[key] -= 1
            if not self._writing[key]:
                del self._writing[key]
            self._changed.set()

    def leaves(self, peer_id: str, lane: str, seconds: float) -> None:
        """Note that the bytes just written take so many seconds to leave."""
        key, until_s = (peer_id, RANKS[lane]), now.monotonic_s() + min(seconds, LEAVES_LIMIT_S)
        leaving = self._not_left()
        self._leaving = {**leaving, key: max(until_s, leaving.get(key, 0.0))}

    def _not_left(self) -> dict[tuple[str, int], float]:
        """The peers and ranks whose bytes are still leaving now. Called from any thread."""
        now_s = now.monotonic_s()
        return {key: end_s for key, end_s in self._leaving.items() if end_s > now_s}

    def of(self, peer_id: str, lane: str) -> "LaneTurn":
        """The turn that a lane asks before each piece that it writes."""
        return LaneTurn(self, peer_id, lane)

    async def give(self, peer_id: str, lane: str) -> None:
        """Wait while a lane that goes first has something to write."""
        rank = RANKS[lane]
        end_s = now.monotonic_s() + GIVE_WAY_S
        while self._must_wait(peer_id, rank) and (left_s := end_s - now.monotonic_s()) > 0:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, self._next_change_s())):
                    await self._changed.wait()

    def _next_change_s(self) -> float:
        """Seconds until the next bytes have left. No event tells of that."""
        end_s = min(self._not_left().values(), default=math.inf)
        return max(0.0, end_s - now.monotonic_s())

    def must_give(self, peer_id: str, lane: str) -> bool:
        """Whether a lane that goes first has something to write. May be asked from any thread."""
        return self._must_wait(peer_id, RANKS[lane])

    def _must_wait(self, peer_id: str, rank: int) -> bool:
        return any(
            other < rank and (self.shares_uplink or peer == peer_id)
            for peer, other in (*tuple(self._writing), *self._not_left())
        )


class LaneTurn:
    """The place of one lane among others."""

    def __init__(self, priority: LanePriority, peer_id: str, lane: str) -> None:
        self._priority = priority
        self._peer_id = peer_id
        self._lane = lane

    def must_wait(self) -> bool:
        """Whether another lane goes first. Asked from any thread."""
        return self._priority.must_give(self._peer_id, self._lane)

    async def wait(self) -> None:
        """Let the other lane go first, but not for long."""
        await self._priority.give(self._peer_id, self._lane)
