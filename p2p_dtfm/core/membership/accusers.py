"""What this peer remembers of troublesome members.

They accuse others whom most hear, were lately in doubt with somebody, stop steps or hold up
attempts.
"""

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
"""So many last pairs are kept, some 14 KB in a contribution. That many come of eleven colluders of
34 that accuse as many at once as they can have out."""
STOPS_LIMIT = 3
"""A member may stop the steps so often without a commit in between."""
STOPS_OFTEN = 12
"""A member may stop the steps so often in a minute, or in `STOPS_STEPS` steps, which may take
hours. `STOPS_STEPS` is smaller than this: one line that breaks once in each step may be nobody's
fault (`core.liveness.lost_tensors`)."""
STOPS_STEPS = 8
OFTEN_NS = 60 * SECOND_NS
UNANSWERED_LIMIT = 3
"""So many views in a row without its word are too many for a member that trains. Fewer are excused:
messages get lost, and machines are busy."""


class Accusers:
    """What this peer has seen of attempts; it outlives views, but not this peer's life."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, int]] = {}
        self._pairs: dict[Pair, int] = {}
        """By pair that was in doubt: when last."""
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
        """These members kept an attempt from its end. Returns those that did so before of late. Who
        `had_agreed` on what is known has less of an excuse: it is remembered for longer."""
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
        """These members are alive, and an attempt was given up without a word of theirs. Returns
        those of whom that is so too often in a row.

        It counts once between two steps that commit. A member that promised in its Prepared to wait
        for an earlier view must not answer before that step commits, however long that takes.
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
        """These members have contributed to a view that was to be agreed on."""
        for member in members:
            self._unanswered.pop(member, None)

    def commits(self) -> None:
        """A step has committed."""
        self._commits += 1

    def stops_steps(self, members: Collection[Member], now_ns: int) -> set[Member]:
        """These members have all agree anew, and give no reason. Returns those that do so too
        often."""
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
        """An attempt is over. A member has accused a peer in vain if that peer was heard, and fewer
        than half of the members heard accuse it. If the accused is one of these members, the two
        were in doubt. A newcomer's accusation is not heeded: keys are made for nothing, and one
        liar could have all members in doubt but itself."""
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
        """An attempt is over in which one of each pair had to go. Nobody knew which of the two does
        not say what is so, or which end of a line does not hear the other.

        The one at fault will be in doubt with somebody else next: then that one stays. Else a liar
        whose id is low has the others go, one after the other, until it is alone. Two liars can do
        so, too, if each time both are in doubt with a third member.

        What counts is with how many a member was in doubt, not how often. Few liars can be in doubt
        with one honest member as often as they like, but they are only so many. And several that
        accuse several at once would be in doubt only once each. By that they had all others out in
        as many attempts as they were.
        """
        for pair in sorted({pair_of(*pair) for pair in pairs}):
            self._pairs.pop(pair, None)
            self._pairs[pair] = now_ns
        while len(self._pairs) > DOUBTS_LIMIT:
            del self._pairs[next(iter(self._pairs))]

    def adopt(self, contributions: Iterable[Contribution], now_ns: int) -> None:
        """Takes over what most members say of attempts before this peer, new among them, came. Else
        too few would know of these once many have come, or have been out and let in again."""
        self.heed_doubts(earlier_doubts(contributions), now_ns)

    def named(self, now_ns: int) -> tuple[str, ...]:
        """Peers that have accused others in vain in several attempts of late."""
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
    """Notes the attempt for the peer; of each peer the last `ATTEMPTS` are kept."""
    attempts = seen.setdefault(peer_id, {})
    attempts.setdefault(number, now_ns)
    while len(attempts) > ATTEMPTS:
        del attempts[next(iter(attempts))]
    while len(seen) > PEERS_LIMIT:
        del seen[next(iter(seen))]
