"""Who accuses others again and again, though they are heard by most, who was lately in doubt with
somebody, or holds up all others."""

from collections.abc import Collection, Iterable, Mapping

from p2p_dtfm.core.membership.eligibility import Pair, earlier_doubts, pair_of
from p2p_dtfm.core.messages.agreement_messages import Accusation, Contribution
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.units import SECOND_NS

REMEMBERED_NS = 600 * SECOND_NS
ATTEMPTS = 2
PEERS_LIMIT = 256
NAMED_LIMIT = 64
DOUBTS_LIMIT = 128
"""Pairs, the last ones, some 14 KB in a contribution: as many as eleven colluders of 34 make that
accuse as many at once as they can have out."""
STOPS_LIMIT = 3
"""So often a member may stop the steps without one that commits in between."""
STOPS_OFTEN = 12
"""In a minute, or in `STOPS_STEPS`, which may take hours: not in as many steps, since one line that
breaks in each of them may be nobody's fault (`core.liveness.lost_tensors`)."""
STOPS_STEPS = 8
OFTEN_NS = 60 * SECOND_NS
UNANSWERED_LIMIT = 3
"""So many views in a row a member may leave without its word, while it trains: messages get lost,
and machines are busy."""


class Accusers:
    """What this peer has seen of attempts; it outlives views, but not this peer's life."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, int]] = {}
        self._pairs: dict[Pair, int] = {}
        """Which two were in doubt, and when last."""
        self._held_up: dict[Member, tuple[int, int]] = {}
        self._stops: dict[Member, list[tuple[int, int]]] = {}
        self._unanswered: dict[Member, tuple[int, int]] = {}
        """How many in a row, and how many steps had committed at the last of them."""
        self._commits = 0

    def holds_up(
        self,
        members: Collection[Member],
        number: int,
        now_ns: int,
        had_agreed: bool = True,
    ) -> set[Member]:
        """They kept an attempt from its end; those of them that have done so of late before. Who
        `had_agreed` on what is known has less of an excuse."""
        within_ns = REMEMBERED_NS if had_agreed else OFTEN_NS
        again = set()
        for member in members:
            before, at_ns = self._held_up.pop(member, (number, now_ns))
            if before != number and now_ns - at_ns < within_ns:
                again.add(member)
            self._held_up[member] = number, now_ns
        while len(self._held_up) > PEERS_LIMIT:
            del self._held_up[next(iter(self._held_up))]
        return again

    def says_nothing(self, members: Collection[Member]) -> set[Member]:
        """They are alive, and an attempt was given up without a word of theirs; those of whom that
        is so too often in a row.

        It counts once between two steps that commit: who has promised in its Prepared to wait for
        an earlier view must not answer before that step commits, however long that takes.
        """
        found = set()
        for member in members:
            times, commits = self._unanswered.pop(member, (0, -1))
            times += commits != self._commits
            self._unanswered[member] = times, self._commits
            if times >= UNANSWERED_LIMIT:
                found.add(member)
        while len(self._unanswered) > PEERS_LIMIT:
            del self._unanswered[next(iter(self._unanswered))]
        return found

    def answers(self, members: Iterable[Member]) -> None:
        """They have contributed to a view that was to be agreed on."""
        for member in members:
            self._unanswered.pop(member, None)

    def commits(self) -> None:
        """A step has committed."""
        self._commits += 1

    def stops_steps(self, members: Collection[Member], now_ns: int) -> set[Member]:
        """They have all agree anew, and give no reason; those that do so too often."""
        found = set()
        for member in members:
            stops = [it for it in self._stops.pop(member, []) if self._is_late(it, now_ns)]
            stops = stops[-STOPS_OFTEN:]
            in_a_row = sum(commits == self._commits for commits, _ in stops)
            if in_a_row >= STOPS_LIMIT or len(stops) >= STOPS_OFTEN:
                found.add(member)
            self._stops[member] = [*stops, (self._commits, now_ns)]
        while len(self._stops) > PEERS_LIMIT:
            del self._stops[next(iter(self._stops))]
        return found

    def _is_late(self, stop: tuple[int, int], now_ns: int) -> bool:
        commits, at_ns = stop
        return now_ns - at_ns < OFTEN_NS or self._commits - commits < STOPS_STEPS

    def heed(
        self,
        number: int,
        accusations: Collection[Accusation],
        heard: Mapping[Member, Contribution],
        me: Member,
        now_ns: int,
    ) -> None:
        """An attempt is over. A member's accusation of who was heard, and is accused by fewer than
        half of the members heard, was not borne out; if that is one of them the two were in
        doubt. A newcomer's is not heeded: keys are made for nothing, and one liar could have all
        members in doubt but itself."""
        members = {member for member, part in heard.items() if part.present is not None}
        charged: dict[Member, set[Member]] = {}
        for item in accusations:
            if item.by in members and item.of in heard:
                charged.setdefault(item.of, set()).add(item.by)
        for of, by in charged.items():
            if 2 * len(by) < len(members):
                for accuser in by - {me, of}:
                    _note(self._seen, accuser.peer_id, number, now_ns)
                if of in members:
                    self.heed_doubts([(it.peer_id, of.peer_id) for it in by - {of}], now_ns)

    def heed_doubts(self, pairs: Iterable[tuple[str, str]], now_ns: int) -> None:
        """An attempt is over, in which one of each pair had to go, and nobody knew which one says
        what is not so, or which end of a line does not hear the other. Who it was will be in doubt
        with somebody else next: then that one stays. Else a liar whose id is low has the others go,
        one after the other, until it is alone; and so have two of whom each time a third one is in
        doubt with both.

        What counts is with how many, not how often: few liars can be in doubt with one honest
        member as often as they like, but are only so many. And several that accuse several at once
        would be in doubt once, and had all others out in as many attempts as they were.
        """
        for pair in sorted({pair_of(*pair) for pair in pairs}):
            self._pairs.pop(pair, None)
            self._pairs[pair] = now_ns
        while len(self._pairs) > DOUBTS_LIMIT:
            del self._pairs[next(iter(self._pairs))]

    def adopt(self, contributions: Iterable[Contribution], now_ns: int) -> None:
        """What most members say of attempts that this peer, new among them, knows nothing of. Else
        too few would know of them once so many have come, or have been out and let in again."""
        self.heed_doubts(earlier_doubts(contributions), now_ns)

    def named(self, now_ns: int) -> tuple[str, ...]:
        """Those that have accused others in vain in several attempts of late."""
        late = {
            peer_id: sum(now_ns - at_ns < REMEMBERED_NS for at_ns in attempts.values())
            for peer_id, attempts in self._seen.items()
        }
        return tuple(sorted(it for it, times in late.items() if times >= ATTEMPTS)[:NAMED_LIMIT])

    def doubted(self, now_ns: int) -> tuple[Pair, ...]:
        """Pairs that were in doubt of late."""
        late = (it for it, at_ns in self._pairs.items() if now_ns - at_ns < REMEMBERED_NS)
        return tuple(sorted(late))


def _note(seen: dict[str, dict[int, int]], peer_id: str, number: int, now_ns: int) -> None:
    """The attempt, of which so many are kept for each peer."""
    attempts = seen.setdefault(peer_id, {})
    attempts.setdefault(number, now_ns)
    while len(attempts) > ATTEMPTS:
        del attempts[next(iter(attempts))]
    while len(seen) > PEERS_LIMIT:
        del seen[next(iter(seen))]
