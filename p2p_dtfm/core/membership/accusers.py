"""Who accuses others again and again, though they are heard by most, who was lately in doubt with
somebody, or holds up all others."""

from collections import Counter
from collections.abc import Collection, Iterable

from p2p_dtfm.core.messages.agreement_messages import Accusation
from p2p_dtfm.core.protocol.snapshot import Member

REMEMBERED_NS = 600_000_000_000
ATTEMPTS = 2
PEERS_LIMIT = 256
NAMED_LIMIT = 64
DOUBTS_LIMIT = 8
"""Of one peer, the last ones."""
STOPS_LIMIT = 3
"""So often a member may stop the steps without one that commits in between."""
STOPS_OFTEN = 12
OFTEN_NS = 60_000_000_000
UNANSWERED_LIMIT = 3
"""So many views in a row a member may leave without its word, while it trains: messages get lost,
and machines are busy."""


class Accusers:
    """What this peer has seen of attempts; it outlives views, but not this peer's life."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, int]] = {}
        self._doubted: dict[str, dict[int, int]] = {}
        """In which attempts each was in doubt, and when."""
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
            stops = self._stops.pop(member, [])
            stops = [stop for stop in stops if now_ns - stop[1] < OFTEN_NS][-STOPS_OFTEN:]
            in_a_row = sum(commits == self._commits for commits, _ in stops)
            if in_a_row >= STOPS_LIMIT or len(stops) >= STOPS_OFTEN:
                found.add(member)
            self._stops[member] = [*stops, (self._commits, now_ns)]
        while len(self._stops) > PEERS_LIMIT:
            del self._stops[next(iter(self._stops))]
        return found

    def heed(
        self,
        number: int,
        accusations: Collection[Accusation],
        heard: Collection[Member],
        me: Member,
        now_ns: int,
    ) -> None:
        """An attempt is over. An accusation of who was heard, and is accused by fewer than half of
        those heard, was not borne out, and the two were in doubt."""
        charged: dict[Member, set[Member]] = {}
        for item in accusations:
            if item.by in heard and item.of in heard:
                charged.setdefault(item.of, set()).add(item.by)
        for of, by in charged.items():
            if 2 * len(by) < len(heard):
                for accuser in by - {me, of}:
                    _note(self._seen, accuser.peer_id, number, now_ns, ATTEMPTS)
                pairs = [(accuser.peer_id, of.peer_id) for accuser in by - {of}]
                self.heed_doubts(number, pairs, me.peer_id, now_ns)

    def heed_doubts(
        self, number: int, pairs: Iterable[tuple[str, str]], me: str, now_ns: int
    ) -> None:
        """An attempt is over, in which one of each pair had to go, and nobody knew which one says
        what is not so, or which end of a line does not hear the other. Who it was will be in doubt
        with somebody else next: then that one stays. Else a liar whose id is low has the others go,
        one after the other, until it is alone; and so have two of whom each time a third one is in
        doubt with both."""
        for peer_id in sorted({peer_id for pair in pairs for peer_id in pair} - {me}):
            self._doubted[peer_id] = self._doubted.pop(peer_id, {})  # the newest is kept longest
            _note(self._doubted, peer_id, number, now_ns, DOUBTS_LIMIT)

    def named(self, now_ns: int) -> tuple[str, ...]:
        """Those that have done so in several attempts of late, or were in doubt in one; of the
        latter each once more for each attempt in which it was."""

        def is_late(at_ns: int) -> bool:
            return now_ns - at_ns < REMEMBERED_NS

        times = Counter[str]()
        for peer_id, attempts in self._doubted.items():
            in_so_many = sum(map(is_late, attempts.values()))
            times[peer_id] = 1 + in_so_many if in_so_many else 0
        for peer_id, attempts in self._seen.items():
            if sum(map(is_late, attempts.values())) >= ATTEMPTS:
                times[peer_id] = max(1, times[peer_id])
        once = sorted(+times)
        again = sorted((+times - Counter(once)).elements())
        return tuple(sorted([*once, *again][:NAMED_LIMIT]))


def _note(
    seen: dict[str, dict[int, int]], peer_id: str, number: int, now_ns: int, limit: int
) -> None:
    """The attempt, of which so many are kept for each peer."""
    attempts = seen.setdefault(peer_id, {})
    attempts.setdefault(number, now_ns)
    while len(attempts) > limit:
        del attempts[next(iter(attempts))]
    while len(seen) > PEERS_LIMIT:
        del seen[next(iter(seen))]
