"""Who can be reached, judged from what has been heard and when.

Pure: the caller passes the time and what it saw. A suspicion is evidence about the link from this
peer to another one; whether that peer is dead, the members decide together (`core.agreement`). A
slow peer is never suspected: it says that it lives, and that its work gets on.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class LivenessTiming:
    heartbeat_ns: int
    """Anything said to a peer counts as one, up to four times; then one with progress is due."""
    silence_ns: int
    """Nothing heard for so long is evidence."""
    reset_ns: int
    """After a stream to a peer broke: nothing heard since for so long is evidence."""
    stuck_ns: int
    """A peer that has work, but has completed none for so long, is stuck."""
    sleep_ns: int
    """A longer time between two ticks means that this peer itself was asleep."""


STUCK_STEPS = 4

LAN_LIVENESS = LivenessTiming(
    heartbeat_ns=SECOND_NS // 2,
    silence_ns=5 * SECOND_NS,
    reset_ns=SECOND_NS * 3 // 4,
    stuck_ns=60 * SECOND_NS,
    sleep_ns=2 * SECOND_NS,
)
WAN_LIVENESS = LivenessTiming(
    heartbeat_ns=SECOND_NS,
    silence_ns=5 * SECOND_NS,
    reset_ns=2 * SECOND_NS,
    stuck_ns=120 * SECOND_NS,
    sleep_ns=3 * SECOND_NS,
)


@dataclass(frozen=True)
class Suspicion:
    peer_id: str
    reason: str


@dataclass
class _Watched:
    heard_ns: int
    progress: int = -1
    progressed_ns: int = 0
    waits: bool = True
    reset_ns: int | None = None
    said_ns: int = 0
    beat_ns: int = 0
    suspected: bool = False


class Liveness:
    """Watches a set of peers; `tick` gives new suspicions, each once until the peer is heard."""

    def __init__(self, timing: LivenessTiming) -> None:
        self._timing = timing
        self._watched: dict[str, _Watched] = {}
        self._last_tick_ns: int | None = None
        self._stuck_ns = timing.stuck_ns

    def expect_steps_of(self, step_ns: int) -> None:
        """A step takes about so long; who has completed nothing for some of them is stuck."""
        self._stuck_ns = max(self._timing.stuck_ns, STUCK_STEPS * step_ns)

    def watch(self, peers: Iterable[str], now_ns: int) -> None:
        """Watch exactly these; a peer that is new to the set counts as heard now."""
        wanted = set(peers)
        for peer_id in set(self._watched) - wanted:
            del self._watched[peer_id]
        for peer_id in wanted - set(self._watched):
            self._watched[peer_id] = _Watched(now_ns, progressed_ns=now_ns)

    def heard(self, peer_id: str, now_ns: int) -> None:
        """Any message or tensor from this peer."""
        watched = self._watched.get(peer_id)
        if watched is not None:
            watched.heard_ns = max(watched.heard_ns, now_ns)
            watched.reset_ns = None
            watched.suspected = False

    def heartbeat(self, peer_id: str, progress: int, waits: bool, now_ns: int) -> None:
        """What the peer says of its work: a counter that grows, and whether it waits for others."""
        self.heard(peer_id, now_ns)
        watched = self._watched.get(peer_id)
        if watched is not None and (waits or watched.waits or progress != watched.progress):
            watched.progress, watched.waits, watched.progressed_ns = progress, waits, now_ns

    def stream_reset(self, peer_id: str, now_ns: int) -> None:
        """A stream to this peer broke, or a call to it was refused."""
        watched = self._watched.get(peer_id)
        if watched is not None and watched.reset_ns is None:
            watched.reset_ns = now_ns

    def said(self, peer_id: str, now_ns: int) -> None:
        """Something was sent to this peer."""
        watched = self._watched.get(peer_id)
        if watched is not None:
            watched.said_ns = now_ns

    def due_heartbeats(self, now_ns: int) -> tuple[str, ...]:
        """Whom to send a heartbeat now; they count as sent."""
        due = []
        for peer_id, watched in sorted(self._watched.items()):
            silent = now_ns - watched.said_ns >= self._timing.heartbeat_ns
            if silent or now_ns - watched.beat_ns >= 4 * self._timing.heartbeat_ns:
                watched.said_ns = watched.beat_ns = now_ns
                due.append(peer_id)
        return tuple(due)

    def tick(self, now_ns: int) -> list[Suspicion]:
        """New evidence. After a sleep of this peer itself there is none: it has not listened."""
        gap_ns = 0 if self._last_tick_ns is None else now_ns - self._last_tick_ns
        self._last_tick_ns = now_ns
        if gap_ns > self._timing.sleep_ns:
            for watched in self._watched.values():
                watched.heard_ns += gap_ns
                watched.progressed_ns += gap_ns
                if watched.reset_ns is not None:
                    watched.reset_ns += gap_ns
        found = []
        for peer_id, watched in sorted(self._watched.items()):
            reason = "" if watched.suspected else self._judge(watched, now_ns)
            if reason:
                watched.suspected = True
                found.append(Suspicion(peer_id, reason))
        return found

    def _judge(self, watched: _Watched, now_ns: int) -> str:
        timing = self._timing
        silent_ns = now_ns - watched.heard_ns
        if silent_ns >= timing.silence_ns:
            return f"nothing heard for {silent_ns / SECOND_NS:.1f} s"
        if watched.reset_ns is not None and now_ns - watched.reset_ns >= timing.reset_ns:
            return "its stream broke, and nothing was heard since"
        if not watched.waits and now_ns - watched.progressed_ns >= self._stuck_ns:
            return f"no progress for {(now_ns - watched.progressed_ns) / SECOND_NS:.0f} s"
        return ""
