"""How long a donor is waited for, where others have the same states.

What a donor offers lies with it alone, so nobody else can go on with what it has begun. A donor
that gave a byte now and then would never be left, and all would blame the peer that fetches. So a
donor must give what its own line carries for one of several that fetch at once
(`core.liveness.pace`), beside a few seconds. A donor that was left is asked again once all others
have been, with twice the patience each time: a slow one is not given up where there is no better
one.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from p2p_dtfm.core.liveness.pace import FLOOR_NS, SAVE_BYTES_PER_S, bytes_per_s_from
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.net.streams.blobs import CALLS_IN_FLIGHT
from p2p_dtfm.net.streams.donors import CHUNK_LEAST_BYTES
from p2p_dtfm.ports import now

WAIT_S = FLOOR_NS / 1e9
FETCHED_AT_ONCE = 4
"""Layers that are fetched at once."""
IN_FLIGHT_BYTES = FETCHED_AT_ONCE * CALLS_IN_FLIGHT * CHUNK_LEAST_BYTES
"""What may be on its way over a thin line, before any of it is here."""
DOUBLINGS_LIMIT = 16
FAILED_S = 1.0
"""How much time a fetch that fails at once counts for."""
STEPS_AHEAD = 2
"""How many steps may have to pass first: states are offered between two steps."""
RESTS_S = 2.0
"""How long a donor may rest after its last offer, beside the time in which it writes the next one.
A donor with room for some only gives the rest once asked anew."""
SLOW_REMEMBERED = 1024


def note_slow(slow: Counter[str], donor: str) -> None:
    """Note that a donor was left for others once more. Of too many all are forgotten."""
    if donor not in slow and len(slow) >= SLOW_REMEMBERED:
        slow.clear()
    slow[donor] += 1


class Giver:
    """One donor, from when it was turned to until it is left. Only time in which something of it is
    fetched counts."""

    def __init__(self, bytes_per_s: int, times_left: int) -> None:
        """`times_left`: how often it was too slow before."""
        patience = 1 << min(times_left, DOUBLINGS_LIMIT)
        self._wait_s, self._bytes_per_s = WAIT_S * patience, bytes_per_s / patience
        self._owed_bytes: dict[int, int] = {}
        """Bytes by layer. A donor that gives one again gains no time by that."""
        self.came_bytes = 0
        self._fetches = 0
        self._since_s = self._waited_s = 0.0

    @contextlib.contextmanager
    def gives(self, layer: int, size_bytes: int) -> Iterator[None]:
        """A layer of this size is fetched meanwhile."""
        self._owed_bytes[layer] = max(size_bytes, self._owed_bytes.get(layer, 0))
        if not self._fetches:
            self._since_s = now.monotonic_s()
        self._fetches += 1
        try:
            yield
        finally:
            self._fetches -= 1
            if not self._fetches:
                self._waited_s += now.monotonic_s() - self._since_s

    def came(self, size_bytes: int) -> None:
        self.came_bytes += size_bytes

    def failed(self) -> None:
        """A fetch has failed."""
        self._waited_s += FAILED_S

    @property
    def is_late(self) -> bool:
        """Whether it is too slow: never while it gives at its rate, and at last when all should be
        here at that rate."""
        here_s = now.monotonic_s() - self._since_s if self._fetches else 0.0
        due_bytes = min(self.came_bytes + IN_FLIGHT_BYTES, sum(self._owed_bytes.values()))
        return self._waited_s + here_s > self._wait_s + due_bytes / self._bytes_per_s


class Givers:
    """The donors of one follower. `slow`: how often each was left for others, by any follower of
    this peer. One that asks anew in the next view does not begin with the same donor."""

    def __init__(self, view: View, me: str, slow: Counter[str]) -> None:
        self._view = view
        self._slow = slow
        self._left: Counter[str] = Counter()
        self._givers: dict[str, Giver] = {}
        self._asked_s: dict[int, float] = {}
        """Since when each layer is asked for that nobody has offered yet."""
        self._offered_s: dict[str, float] = {}
        """When each donor last offered something, since it was asked."""
        plans = [plan for plan in (view.plan, view.snapshot.present) if isinstance(plan, Plan)]
        step_ns = max((plan.predicted_step_ns for plan in plans), default=0)
        self._made_s = view.state_bytes_of(me) / SAVE_BYTES_PER_S
        self._offers_s = WAIT_S + self._made_s + STEPS_AHEAD * step_ns / 1e9

    def best_of(self, donors: Sequence[str]) -> str:
        """The first of those that were left least often."""
        return min(donors, key=self._slow.__getitem__)

    def of(self, donor: str) -> Giver:
        if donor not in self._givers:
            self._givers[donor] = Giver(bytes_per_s_from(donor, self._view), self._left[donor])
        return self._givers[donor]

    def turned_from(self, donor: str) -> None:
        self._givers.pop(donor, None)

    def too_slow(self, donor: str) -> None:
        """A donor is left for that, and has more time when it is turned to again."""
        self.turned_from(donor)
        self._left[donor] += 1
        note_slow(self._slow, donor)

    def asked(self, layers: Iterable[int]) -> None:
        """These layers are asked for. A donor that makes this peer ask anew gains no time by
        that."""
        for layer in layers:
            self._asked_s.setdefault(layer, now.monotonic_s())

    def offered(self, layer: int, donor: str | None = None) -> None:
        """A donor has offered a layer. With None, somebody else is to be asked for it."""
        self._asked_s.pop(layer, None)
        if donor is not None:
            self._offered_s[donor] = now.monotonic_s()

    def rests(self, layer: int, donor: str) -> bool:
        """Whether a donor has offered others and not this layer, and not because it still writes
        it. That is said once after each of its offers."""
        offered_s = self._offered_s.get(donor)
        if layer not in self._asked_s or offered_s is None:
            return False
        if now.monotonic_s() - offered_s < RESTS_S + self._made_s:
            return False
        del self._offered_s[donor]
        return True

    def owes(self, layer: int, donor: str) -> bool:
        """Whether the donor should have offered the layer by now."""
        since_s = self._asked_s.get(layer)
        limit_s = self._offers_s * (1 << min(self._left[donor], DOUBLINGS_LIMIT))
        return since_s is not None and now.monotonic_s() - since_s > limit_s
