"""Who can be reached, judged from what has been heard and when.

Pure: the caller passes the time and what it saw. A suspicion is evidence about the link from this
peer to another one; whether that peer is dead, the members decide together
(`core.consensus.agreement`). A peer that says that it lives is not suspected here; whether it does
its work is judged from who owes what to whom (`core.liveness.stalls`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from p2p_dtfm.core.liveness.lateness import THINNEST, Lapses, Lateness, of_many_ns
from p2p_dtfm.core.liveness.rhythm import FEWEST_SLOTS, KNOWN_SLOTS, Rhythm
from p2p_dtfm.core.liveness.second_hand import TELLERS, SecondHand
from p2p_dtfm.core.messages.message_bounds import MISSED_LIMIT
from p2p_dtfm.core.units import MILLISECOND_NS, SECOND_NS

CALM_NS = 10 * SECOND_NS
"""Times are calm if for so long this peer was not late, and nobody came, went or was suspected."""
ASKED_BEFORE_NS = SECOND_NS * 3 // 10
"""So long before their silence about a peer becomes evidence, all others are asked once more."""
LATE_FACTOR = 3
"""This many times this peer's own delay is added to a bound: others' loops may be as late."""
THIN_ABOVE = 8
"""A peer with more fellows than this speaks to each less often, so that it says as much a second in
all. With `THINNEST` fellows, or more, it speaks to each a quarter as often."""


@dataclass(frozen=True)
class LivenessTiming:
    heartbeat_ns: int
    """The time between heartbeats. Anything else said to a peer counts as one, up to twice; then a
    heartbeat that tells of work is due."""
    silence_ns: int
    """Nothing heard for so long is evidence, whatever is usual for a peer."""
    least_silence_ns: int
    """Never suspect for a shorter silence, however regularly a peer speaks."""
    calm_silence_ns: int
    """The same bound for a peer that has long been regular, while nothing else is unsettled."""
    missed_ns: int
    """After so long a silence of a peer, fellows are asked whether they hear it."""
    cut_ns: int
    """If others have heard the peer this much later than this one has, the link is cut; 0: never
    judged."""
    reset_ns: int
    """Nothing heard for so long, after a stream to the peer broke, is evidence."""
    refused_ns: int
    """The same where nobody listens at the peer's addresses any more: its process has ended."""
    punctual_ns: int
    """If two ticks are further apart than this, this peer's own loop was late by the difference.
    Silences count as that much shorter."""
    sleep_ns: int
    """A longer time between two ticks means that this peer itself was asleep."""
    together_ns: int = 0
    """If the fellows asked have not heard a peer for this long either, that is evidence, even where
    the silence here would not be. Longer in unsettled times. 0: never judged."""

    @cached_property
    def innocent_ns(self) -> int:
        """A shorter silence is evidence of nothing, whatever else is known. Each bound is at least
        one of these, and others have heard nobody later than now."""
        judged = (self.cut_ns, self.together_ns, self.calm_silence_ns, self.least_silence_ns)
        return min(self.silence_ns, *filter(None, judged))


LAN_LIVENESS = LivenessTiming(
    heartbeat_ns=SECOND_NS // 2,
    silence_ns=5 * SECOND_NS,
    least_silence_ns=4 * SECOND_NS,
    calm_silence_ns=SECOND_NS * 5 // 2,
    together_ns=2 * SECOND_NS,
    missed_ns=SECOND_NS,
    cut_ns=SECOND_NS * 3 // 2,
    reset_ns=SECOND_NS * 3 // 4,
    refused_ns=SECOND_NS // 20,
    punctual_ns=SECOND_NS // 4,
    sleep_ns=2 * SECOND_NS,
)
WAN_LIVENESS = LivenessTiming(
    heartbeat_ns=SECOND_NS,
    silence_ns=5 * SECOND_NS,
    least_silence_ns=5 * SECOND_NS,
    calm_silence_ns=5 * SECOND_NS,
    missed_ns=2 * SECOND_NS,
    cut_ns=0,
    reset_ns=2 * SECOND_NS,
    refused_ns=SECOND_NS // 2,
    punctual_ns=SECOND_NS // 2,
    sleep_ns=3 * SECOND_NS,
)


@dataclass(frozen=True)
class Suspect:
    peer_id: str
    reason: str


@dataclass
class _Watched:
    heard_ns: int
    """For judging alone: later than the peer was heard by what this peer's own loop was late."""
    truly_heard_ns: int
    """When the peer was heard, as fellows are told."""
    reset_ns: int | None = None
    is_refused: bool = False
    """The stream broke, and nobody listens where the peer was."""
    is_rerouted: bool = False
    """The stream broke, a relay was between, and the way may lead through another relay."""
    said_ns: int = 0
    beat_ns: int = 0
    asked: bool = False
    """A heartbeat is due at once."""
    suspected: bool = False
    missed: bool = False
    """Fellows were asked about this peer."""
    missed_again: bool = False
    """Fellows were asked a second time, before their silence counts as evidence."""
    settled_from_ns: int = 0
    """`Liveness._settled_from_ns` when the peer was missed: suspicions of others since then do not
    slow the judgement."""
    rhythm: Rhythm = field(default_factory=Rhythm)


class Liveness:
    """Watches a set of peers; `tick` gives new suspicions, each once until the peer is heard."""

    def __init__(self, timing: LivenessTiming) -> None:
        self._timing = timing
        self._watched: dict[str, _Watched] = {}
        self._second_hand = SecondHand()
        self._lateness = Lateness()
        self._last_tick_ns: int | None = None
        self._lapses = Lapses(CALM_NS)
        self._fellows = 0
        self._calm_from_ns = 0
        self._settled_from_ns = 0
        """Like `_calm_from_ns`, but lateness of this peer itself does not count."""
        self._late_until_ns = 0
        """What is heard before then may have been said while this peer's own loop stood still."""

    @property
    def sleep_ns(self) -> int:
        """A longer time between two ticks means that this peer was asleep."""
        return self._timing.sleep_ns

    def watch(self, peers: Iterable[str], now_ns: int, fellows: int | None = None) -> None:
        """Watch exactly these; a peer that is new to the set counts as heard now. `fellows`: how
        many are in the view in all, which both ends of a link know alike."""
        wanted = set(peers)
        self._fellows = len(wanted) if fellows is None else fellows
        if wanted != self._watched.keys():
            self._unsettle(now_ns)
        for peer_id in set(self._watched) - wanted:
            del self._watched[peer_id]
        for peer_id in wanted - set(self._watched):
            self._watched[peer_id] = _Watched(now_ns, now_ns)
        self._second_hand.keep(wanted)

    def heard(self, peer_id: str, now_ns: int) -> None:
        """Any message or tensor from this peer."""
        watched = self._watched.get(peer_id)
        if watched is not None:
            silent_ns = now_ns - watched.heard_ns - self._untold_late_ns(now_ns)
            watched.rhythm.heard(max(0, silent_ns), now_ns)
            watched.heard_ns = max(watched.heard_ns, now_ns)
            if not self._is_late(now_ns):
                watched.truly_heard_ns = now_ns
            watched.reset_ns = None
            watched.is_refused = watched.is_rerouted = False
            watched.suspected = False
            if watched.missed:
                watched.missed = watched.missed_again = False
                self._second_hand.forget(peer_id)

    def stream_reset(
        self, peer_id: str, now_ns: int, is_refused: bool = False, is_rerouted: bool = False
    ) -> None:
        """A stream to this peer broke, or a call to it failed. `is_refused`: nobody listens at any
        of its addresses. `is_rerouted`: a relay was between, and no other relay says that it has
        lost the peer. The peer is called at once, to find out which it is."""
        watched = self._watched.get(peer_id)
        if watched is None:
            return
        if watched.reset_ns is None:
            watched.reset_ns = now_ns
            watched.asked = watched.is_rerouted = True
        watched.is_refused = watched.is_refused or is_refused
        watched.is_rerouted = watched.is_rerouted and is_rerouted

    def speak_to(self, peers: Iterable[str]) -> None:
        """There is something to say to these: a heartbeat is due at once."""
        for peer_id in peers:
            if (watched := self._watched.get(peer_id)) is not None:
                watched.asked = True

    def fellow_says(
        self, sender: str, missed: Collection[str], silent_ms: Mapping[str, int], now_ns: int
    ) -> None:
        """A heartbeat has come. `missed`: peers that its sender misses. `silent_ms`: how long the
        sender has not heard the peers that others miss."""
        if (watched := self._watched.get(sender)) is None:
            return
        ours = self._watched.keys() - {sender}
        is_new = self._second_hand.asks(sender, asked := ours & set(missed), now_ns)
        if is_new or (asked and now_ns - watched.said_ns >= ASKED_BEFORE_NS):
            watched.asked = True
        told = {name: since_ms for name, since_ms in silent_ms.items() if name in ours}
        self._second_hand.told(sender, told, now_ns)

    def missed(self) -> tuple[str, ...]:
        """The peers of whom fellows are asked, in order; none where they are too many."""
        names = sorted(name for name, watched in self._watched.items() if watched.missed)
        return tuple(names) if len(names) <= MISSED_LIMIT else ()

    def silent_ms(self, now_ns: int) -> dict[str, int]:
        """By peer that somebody misses: for how long it has not been heard here."""
        if self._is_late(now_ns):  # what they have said meanwhile is still to be read
            return {}
        wanted = self._second_hand.wanted(now_ns)
        silent_ns = {
            name: now_ns - watched.truly_heard_ns
            for name, watched in sorted(self._watched.items())
            if name in wanted
        }
        return {name: max(0, ns) // MILLISECOND_NS for name, ns in silent_ns.items()}

    def said(self, peer_id: str, now_ns: int) -> None:
        """Something was sent to this peer."""
        watched = self._watched.get(peer_id)
        if watched is not None:
            watched.said_ns = now_ns

    def due_heartbeats(self, now_ns: int) -> tuple[str, ...]:
        """The peers to send a heartbeat now; it counts as sent."""
        due, heartbeat_ns = [], self._thinned_ns(self._timing.heartbeat_ns)
        for peer_id, watched in sorted(self._watched.items()):
            silent = now_ns - watched.said_ns >= heartbeat_ns
            beat_due = now_ns - watched.beat_ns >= 2 * heartbeat_ns
            if silent or beat_due or watched.asked:
                watched.said_ns = watched.beat_ns = now_ns
                watched.asked = False
                due.append(peer_id)
        return tuple(due)

    def tick(self, now_ns: int) -> list[Suspect]:
        """New evidence. Time in which this peer's own loop was late, or slept, does not count. It
        has not listened then, and the peer that it would accuse may well have spoken."""
        gap_ns = 0 if self._last_tick_ns is None else now_ns - self._last_tick_ns
        self._last_tick_ns = now_ns
        self._lateness.ticked(now_ns)
        late_ns = gap_ns - self._timing.punctual_ns
        if late_ns > 0:
            self._late_until_ns = now_ns + self._timing.punctual_ns
            self._calm_from_ns = now_ns + CALM_NS
            self._lapses.note(late_ns, now_ns)
            for watched in self._watched.values():
                watched.heard_ns = min(now_ns, watched.heard_ns + late_ns)
                if watched.reset_ns is not None:
                    watched.reset_ns = min(now_ns, watched.reset_ns + late_ns)
        return self._judge_all(now_ns)

    def tick_early(self, now_ns: int) -> list[Suspect]:
        """New evidence between two ticks, at `due_ns`. If this peer is late by then it leaves the
        judgement to the next tick, which knows by how much."""
        if self._last_tick_ns is None or now_ns - self._last_tick_ns > self._timing.punctual_ns:
            return []
        return self._judge_all(now_ns)

    def due_ns(self, now_ns: int) -> int | None:
        """When something is to be judged or said, if nothing is heard before; `now_ns` if it is due
        already. A suspected peer is not judged again."""
        due = (self._due_ns(peer_id, it, now_ns) for peer_id, it in self._watched.items())
        return min((due_ns for due_ns in due if due_ns is not None), default=None)

    def _due_ns(self, peer_id: str, watched: _Watched, now_ns: int) -> int | None:
        if watched.asked or (not watched.suspected and self._judge(peer_id, watched, now_ns)):
            return now_ns
        if watched.suspected:
            return None
        timing = self._timing
        if watched.reset_ns is not None and watched.is_rerouted:
            return max(now_ns, watched.reset_ns + self._patience_ns(timing.least_silence_ns))
        is_missed_next = timing.cut_ns > 0 and not watched.missed
        missed_ns = self._patience_ns(self._thinned_ns(timing.missed_ns))
        if is_missed_next and missed_ns <= timing.innocent_ns:
            due_ns = watched.heard_ns + missed_ns
        else:
            due_ns = watched.heard_ns + self._patience_ns(self._bound_ns(watched, now_ns))
            if is_missed_next:
                due_ns = min(due_ns, watched.heard_ns + missed_ns)
            due_ns = min(due_ns, self._together_due_ns(peer_id, watched, now_ns) or due_ns)
        if watched.reset_ns is not None:
            patience_ns = self._patience_ns(timing.reset_ns)
            broken_ns = min(timing.refused_ns, patience_ns) if watched.is_refused else patience_ns
            due_ns = min(due_ns, watched.reset_ns + broken_ns)
        return max(now_ns, due_ns)

    def _judge_all(self, now_ns: int) -> list[Suspect]:
        self._miss(now_ns)
        found = []
        for peer_id, watched in sorted(self._watched.items()):
            reason = "" if watched.suspected else self._judge(peer_id, watched, now_ns)
            if reason:
                watched.suspected = True
                self._unsettle(now_ns)
                found.append(Suspect(peer_id, reason))
        return found

    def _unsettle(self, now_ns: int) -> None:
        self._calm_from_ns = self._settled_from_ns = now_ns + CALM_NS

    def _is_late(self, now_ns: int) -> bool:
        """Whether what is heard now may be old."""
        return now_ns < self._late_until_ns or self._untold_late_ns(now_ns) > 0

    def _untold_late_ns(self, now_ns: int) -> int:
        """By how much this peer's own loop is late, of which no tick has told yet: of a process
        that goes on sockets are read before timers fire."""
        last_ns = now_ns if self._last_tick_ns is None else self._last_tick_ns
        return max(0, now_ns - last_ns - self._timing.punctual_ns)

    def _miss(self, now_ns: int) -> None:
        """Asks all others at once about the peers that have newly fallen silent."""
        if not self._timing.cut_ns:
            return
        missed_ns = now_ns - self._patience_ns(self._thinned_ns(self._timing.missed_ns))
        newly = [it for it in self._watched.values() if it.heard_ns <= missed_ns and not it.missed]
        for watched in newly:
            watched.missed, watched.settled_from_ns = True, self._settled_from_ns
        again = [it for it in self._watched.values() if self._is_to_be_missed_again(it, now_ns)]
        for watched in again:
            watched.missed_again = True
        if newly or again:
            self.speak_to(name for name, watched in self._watched.items() if not watched.missed)

    def _is_to_be_missed_again(self, watched: _Watched, now_ns: int) -> bool:
        if watched.missed_again or watched.suspected or not watched.missed:
            return False
        bound_ns = self._together_bound_ns(watched, now_ns)
        return bound_ns > 0 and now_ns - watched.heard_ns >= bound_ns - ASKED_BEFORE_NS

    def _thinned_ns(self, apart_ns: int) -> int:
        """The time stretched for a crowd: one of many says less to each, and misses each later."""
        return apart_ns * min(max(self._fellows, THIN_ABOVE), THINNEST) // THIN_ABOVE

    def _patience_ns(self, patience_ns: int) -> int:
        return self._lateness.stretched_ns(patience_ns, len(self._watched))

    def _bound_ns(self, watched: _Watched, now_ns: int) -> int:
        """A longer silence than this is evidence. A living peer is silent for seconds for one of
        three reasons. Its machine does other things, which lasts and shows in its rhythm. A view
        takes its first steps. Or this peer itself is late. Other reasons are very rare."""
        timing = self._timing
        is_calm = now_ns >= self._calm_from_ns and watched.rhythm.is_known
        least_ns = timing.calm_silence_ns if is_calm else timing.least_silence_ns
        silence_ns = of_many_ns(self._fellows, timing.silence_ns)
        return watched.rhythm.bound_ns(of_many_ns(self._fellows, least_ns), silence_ns)

    def _together_bound_ns(self, watched: _Watched, now_ns: int) -> int:
        """If nobody that is asked has heard the peer for so long, that is evidence; 0: no time is.
        The bound grows with what speaks for a living peer that is slow. Somebody came or went
        lately, the peer is not known for long, or this peer's own loop was late."""
        timing, known_slots = self._timing, watched.rhythm.known_slots
        if not timing.together_ns or known_slots < FEWEST_SLOTS:
            return 0
        doubt_ns = timing.least_silence_ns - timing.together_ns
        settled_from_ns = watched.settled_from_ns if watched.missed else self._settled_from_ns
        unsettled_ns = max(0, settled_from_ns - now_ns) * doubt_ns // CALM_NS
        unknown_ns = (KNOWN_SLOTS - known_slots) * doubt_ns // (KNOWN_SLOTS - FEWEST_SLOTS)
        late_ns = LATE_FACTOR * self._lapses.longest_ns(now_ns)
        least_ns = self._thinned_ns(timing.together_ns) + unsettled_ns + unknown_ns + late_ns
        return self._patience_ns(
            watched.rhythm.bound_ns(
                least_ns, max(least_ns, of_many_ns(self._fellows, timing.silence_ns))
            )
        )

    def _heard_by_any_ns(self, peer_id: str, watched: _Watched, now_ns: int) -> int | None:
        """When anybody heard the peer last; None unless enough others have just said when they did:
        at least half of those heard here, and `TELLERS` where there are so many."""
        others = sum(not it.missed for it in self._watched.values())
        if not watched.missed or not others:
            return None
        needed = max(min(TELLERS, others), (others + 1) // 2)
        return self._second_hand.heard_by_any_ns(peer_id, watched.heard_ns, needed, now_ns)

    def _together_due_ns(self, peer_id: str, watched: _Watched, now_ns: int) -> int | None:
        """When others are asked once more about the peer, or their not hearing it is evidence."""
        if not watched.missed:
            return None
        bound_ns = self._together_bound_ns(watched, now_ns)
        if not bound_ns:
            return None
        if not watched.missed_again:
            return watched.heard_ns + bound_ns - ASKED_BEFORE_NS
        heard_ns = self._heard_by_any_ns(peer_id, watched, now_ns)
        return None if heard_ns is None else heard_ns + bound_ns

    def _is_silent_together(self, peer_id: str, watched: _Watched, now_ns: int) -> bool:
        bound_ns = self._together_bound_ns(watched, now_ns)
        if not bound_ns or now_ns - watched.heard_ns < bound_ns:
            return False
        heard_ns = self._heard_by_any_ns(peer_id, watched, now_ns)
        return heard_ns is not None and now_ns - heard_ns >= bound_ns

    def _judge(self, peer_id: str, watched: _Watched, now_ns: int) -> str:
        if watched.reset_ns is not None and watched.is_rerouted:
            return self._judge_rerouted(now_ns - watched.reset_ns)
        timing = self._timing
        silent_ns = now_ns - watched.heard_ns
        if silent_ns < timing.innocent_ns and watched.reset_ns is None:
            return ""
        elsewhere_ns = self._second_hand.heard_elsewhere_ns(peer_id, len(self._watched) - 1)
        cut_ns = self._patience_ns(self._thinned_ns(timing.cut_ns))
        if timing.cut_ns and elsewhere_ns - watched.heard_ns >= cut_ns:
            return f"nothing heard for {silent_ns / SECOND_NS:.1f} s, while others hear it"
        if self._is_silent_together(peer_id, watched, now_ns):
            return f"nothing heard for {silent_ns / SECOND_NS:.1f} s, by others neither"
        if silent_ns >= self._patience_ns(self._bound_ns(watched, now_ns)):
            return f"nothing heard for {silent_ns / SECOND_NS:.1f} s"
        if watched.reset_ns is None:
            return ""
        broken_ns = now_ns - watched.reset_ns
        if watched.is_refused and broken_ns >= timing.refused_ns:
            return "its stream broke, and nobody listens where it was"
        if broken_ns >= self._patience_ns(timing.reset_ns):
            return "its stream broke, and nothing was heard since"
        return ""

    def _judge_rerouted(self, broken_ns: int) -> str:
        """The relay may have died, which breaks all lines over it at once. To find a way through
        another one, two peers must call one another, and a third must join them. That takes
        seconds, in which others hear the peer, or miss it just as well."""
        if broken_ns < self._patience_ns(self._timing.least_silence_ns):
            return ""
        return "its relay is gone, and nothing was heard another way since"
