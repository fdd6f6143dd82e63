"""Bytes between hosts: each pair has a link in each direction, with delay, rate and accidents.

What is sent over one link arrives in its order, as over libp2p's one connection. Where lanes are
apart, each stream and each call has an order of its own, as over direct lines. Any of them may be
held up while the others go on. Lost packets come late, as with TCP. What is sent into a cut link
arrives when the link is mended, if that is soon, and never otherwise.
"""

import asyncio
import contextvars
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from p2p_dtfm.core.units import MILLISECOND_NS, SECOND_NS

RETRANSMISSION_NS = 200 * MILLISECOND_NS
SLOWER = 50
SLOW_NS = 120 * MILLISECOND_NS
NEARER = 20
NARROWER = 50
BYTES_PER_S = (10_000_000, 120_000_000)
SOON_MEASURED_BYTES_PER_S = (10_000_000, 20_000_000)
"""At these rates the first probe of a line takes long enough to be the last. Otherwise probes are
nearly half of all that happens."""
THIN_BYTES_PER_S = (600_000, 1_250_000)
"""At these rates a probe of two reports is long enough."""
LINES_AT_ONCE = 256
HELD_UP = 0.02
HELD_UP_NS = (50 * MILLISECOND_NS, 1500 * MILLISECOND_NS)
"""Where lanes are apart, this share of pieces comes so much later, and so does what follows on
their lanes."""
ALL_LANES = 0
"""The lane of what concerns the connection itself: it comes after all that was sent before."""
CALL = "call "
"""The beginning of a call's name in the trace."""
PATIENCE_S = 30.0
"""Both ends give up a connection whose link is cut for longer."""


@dataclass
class VirtualLink:
    """A link in one direction."""

    latency_ns: int
    bytes_per_s: int
    loss: float = 0.0
    doubled: float = 0.0
    """The share of calls that come twice: the asker had no answer, and asked once more."""
    damaged: float = 0.0
    """The share of streams' pieces in which some bytes are changed, as by faulty memory."""
    is_slow: bool = False
    is_cut: bool = False
    free_ns: int = 0
    last_ns: int = 0
    lanes_ns: dict[int, int] = field(default_factory=dict)
    """When each lane's last piece comes, where lanes are apart."""
    held: list[Callable[[], None]] = field(default_factory=list)


class Trace:
    """A digest of all that has happened so far, in its order."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._lines: list[str] = []
        """Lines that are not in the digest yet."""
        self.count = 0

    def note(self, *facts: object) -> None:
        """Notes facts whose `str` is alike in each run."""
        self.count += 1
        self._lines.append("\x1f".join(map(str, facts)))
        if len(self._lines) >= LINES_AT_ONCE:
            self._take_up()

    def _take_up(self) -> None:
        self._digest.update("".join([f"{line}\n" for line in self._lines]).encode())
        self._lines.clear()

    def digest(self) -> str:
        self._take_up()
        return self._digest.hexdigest()


class Links:
    """All links of a world."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, now_ns: Callable[[], int], draws: random.Random
    ) -> None:
        self.trace = Trace()
        self._loop = loop
        self._nobody = contextvars.Context()
        """The context of arrivals: what is under way arrives though its sender has ended or stands
        still."""
        self._now_ns = now_ns
        self._draws = draws
        self.are_near = False
        """All machines are in one room."""
        self.are_narrow = False
        """Lines carry little, as if models were large for them."""
        self.are_soon_measured = False
        """No line is so fast that its probes would have to be large, not even in one room."""
        self.are_thin = False
        """Lines are as thin as homes' uplinks."""
        self.are_apart = False
        """Lanes and calls have no order among each other."""
        self._links: dict[tuple[str, str], VirtualLink] = {}
        self.arrived_s: dict[tuple[str, str], float] = {}
        """When anything last came, by sender and receiver."""
        self.called_s: dict[tuple[str, str], float] = {}
        """When a call last came, by sender and receiver: it is for a daemon, not for its p2pd."""
        self.carried_bytes = Counter[str]()
        """Bytes that arrived, by the peer that sent them."""

    def of(self, origin: str, goal: str) -> VirtualLink:
        """The link from `origin` to `goal`. It is drawn when it is first asked for."""
        link = self._links.get((origin, goal))
        if link is None:
            latency_ns = self._draws.randrange(MILLISECOND_NS // 5, 10 * MILLISECOND_NS)
            rates = SOON_MEASURED_BYTES_PER_S if self.are_soon_measured else BYTES_PER_S
            rates = THIN_BYTES_PER_S if self.are_thin else rates
            bytes_per_s = self._draws.randrange(*rates)
            if self.are_near:
                latency_ns //= NEARER
                bytes_per_s *= 1 if self.are_soon_measured else NEARER
            if self.are_narrow:
                bytes_per_s //= NARROWER
            link = self._links[origin, goal] = VirtualLink(latency_ns, bytes_per_s)
        return link

    def carry(
        self,
        origin: str,
        goal: str,
        what: str,
        size_bytes: int,
        arrive: Callable[[], None],
        lane: int = ALL_LANES,
    ) -> None:
        """`arrive` is called, in nobody's process, when the bytes are there."""
        link = self.of(origin, goal)
        if link.is_cut:
            link.held.append(partial(self.carry, origin, goal, what, size_bytes, arrive, lane))
            return
        now_ns = self._now_ns()
        start_ns = max(now_ns, link.free_ns)
        slower = SLOWER if link.is_slow else 1
        link.free_ns = start_ns + size_bytes * SECOND_NS * slower // link.bytes_per_s
        latency_ns = link.latency_ns + (SLOW_NS if link.is_slow else 0)
        at_ns = link.free_ns + latency_ns + self._draws.randrange(0, latency_ns // 4)
        if link.loss and self._draws.random() < link.loss:
            at_ns += RETRANSMISSION_NS
        if self.are_apart and lane != ALL_LANES:
            at_ns = self._on_its_lane(link, at_ns, lane)
        else:
            at_ns = link.last_ns = max(link.last_ns + 1, at_ns, *link.lanes_ns.values())
        comes = (link, origin, goal, what, size_bytes, arrive)
        delay_s = (at_ns - now_ns) / 1e9
        self._loop.call_later(delay_s, self._there, *comes, context=self._nobody)

    def _on_its_lane(self, link: VirtualLink, at_ns: int, lane: int) -> int:
        if self._draws.random() < HELD_UP:
            at_ns += self._draws.randrange(*HELD_UP_NS)
        before_ns = max(link.last_ns, link.lanes_ns.get(lane, 0))
        link.lanes_ns[lane] = max(before_ns + 1, at_ns)
        return link.lanes_ns[lane]

    def _there(
        self,
        link: VirtualLink,
        origin: str,
        goal: str,
        what: str,
        size_bytes: int,
        arrive: Callable[[], None],
    ) -> None:
        """Delivers a piece. It is no closure of `carry`: a function that names itself is left to
        the collector, with all that it holds."""
        if link.is_cut:  # it was under way when the link broke
            comes = (link, origin, goal, what, size_bytes, arrive)
            link.held.append(partial(self._there, *comes))
            return
        self.note_arrival(origin, goal, what, size_bytes)
        self.carried_bytes[origin] += size_bytes
        arrive()

    def note_arrival(self, origin: str, goal: str, what: str, size_bytes: int) -> None:
        """Notes that bytes have arrived, by whichever way."""
        self.trace.note(self._now_ns(), origin, goal, what, size_bytes)
        self.arrived_s[origin, goal] = self._now_ns() / 1e9
        if what.startswith(CALL):
            self.called_s[origin, goal] = self._now_ns() / 1e9

    def is_doubled(self, origin: str, goal: str) -> bool:
        """Whether a call that arrives now comes twice."""
        link = self.of(origin, goal)
        return link.doubled > 0 and self._draws.random() < link.doubled

    def is_damaged(self, origin: str, goal: str) -> bool:
        """Whether a piece of a stream that is sent now is damaged."""
        link = self.of(origin, goal)
        return link.damaged > 0 and self._draws.random() < link.damaged

    def cut(self, origin: str, goal: str) -> None:
        """Cuts the link in this direction."""
        self.trace.note(self._now_ns(), "cut", origin, goal)
        self.of(origin, goal).is_cut = True

    def mend(self, origin: str, goal: str) -> None:
        """Mends the link. What was sent meanwhile goes on, in its order."""
        self.trace.note(self._now_ns(), "mend", origin, goal)
        link = self.of(origin, goal)
        link.is_cut = False
        held, link.held = link.held, []
        for go_on in held:
            go_on()

    def forget(self, origin: str, goal: str) -> None:
        """Drops what is held for the connection, which both ends have given up."""
        self.of(origin, goal).held.clear()
