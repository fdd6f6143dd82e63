"""Who must answer in Gather, and who of those that did can be in one view together."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from p2p_dtfm.core.membership.bars import voters
from p2p_dtfm.core.membership.roster import newest_lives
from p2p_dtfm.core.messages.agreement_messages import Accusation, Contribution
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.furthest_step import NOWHERE, FurthestStep

Named = TypeVar("Named", str, tuple[str, str])
Pair = tuple[str, str]
"""Peer ids, in order."""


def universe(
    contributions: Mapping[Member, Contribution], planned: bool = True
) -> frozenset[Member]:
    """Contributors, the members of their views, and the newcomers they name; newest lives only.

    Where anyone is in a view, newcomers name nobody: members know whom they had to keep out. If a
    peer has answered, a later life of it is waited for only once that answers as well: a member
    could name one that does not exist.
    """
    named: set[Member] = set(contributions) | named_newcomers(contributions, planned)
    heard = {member.peer_id for member in contributions}
    presents = {id(it.present): it.present for it in contributions.values()}
    for present in presents.values():
        if present is not None:
            named |= set(present.members)
    return newest_lives(it for it in named if it in contributions or it.peer_id not in heard)


def named_newcomers(
    contributions: Mapping[Member, Contribution], planned: bool = True
) -> set[Member]:
    """Newcomers that those name whose word counts. After a failure of a view that trains its
    members' word does not: one of them could have all wait for its inventions."""
    named: set[Member] = set()
    presents = [part.present for part in contributions.values() if part.present is not None]
    any_view, training = bool(presents), {it.view for it in presents if it.plan is not None}
    for contribution in contributions.values():
        present = contribution.present
        trains = present is not None and present.view in training and not planned
        if not trains and (present is not None or not any_view):
            named |= set(contribution.joiners)
    return named


def still_counting(
    contributions: Mapping[Member, Contribution], me: Member, planned: bool
) -> dict[Member, Contribution]:
    """The contributions that count without those which are left out here, as seen by `me`.

    Somebody has signed two, which came to some in one order and to some in the other. So nobody may
    count who counts by one of these alone: it would do so with some, and not with others.
    """
    mine = contributions[me].present if me in contributions else None
    number = mine.view.number if mine is not None else 0
    kept = {
        member: part
        for member, part in contributions.items()
        if member == me or (part.present is not None and part.present.view.number > number)
    }
    while True:
        named = named_newcomers(kept, planned)
        presents = {part.present.view: part.present for part in kept.values() if part.present}
        named |= {member for present in presents.values() for member in present.members}
        more = {it: contributions[it] for it in named & contributions.keys() - kept.keys()}
        if not more:
            return kept
        kept |= more


def unanswered(
    named: Iterable[Member],
    known: Iterable[Member],
    absent: set[Member],
    accusations: Collection[Accusation],
    watchers: Mapping[str, Collection[str]] | None = None,
) -> set[Member]:
    """Who is still waited for: not heard from, not marked absent, not accused by all heard from.

    `watchers`: in a large swarm only these have anything to do with a peer. Then it is waited for
    unless most of its watchers accuse it, counting those that are heard from and not in doubt
    themselves. If there are none, all others that are not in doubt must accuse it. If everybody is
    in doubt, all must.
    """
    named = set(named)
    heard = named & set(known)
    waited = set()
    accused = {item.of for item in accusations}
    certain = heard - accused
    for member in named - heard - absent:
        if watchers is None:
            must, needed = heard, len(heard)
        else:
            near = {by for by in certain if by.peer_id in watchers.get(member.peer_id, ())}
            must = near or certain or heard
            needed = len(near) // 2 + 1 if near else len(must)
        accusing = sum(Accusation(by, member) in accusations for by in must)
        if not heard or member not in accused or accusing < needed:
            waited.add(member)
    return waited


def mutually_reachable(
    heard: Mapping[Member, Contribution],
    accusations: Collection[Accusation],
    reached_step: Callable[[list[Contribution]], int],
    bounds: Callable[[Collection[Contribution]], FurthestStep] | None = None,
) -> tuple[Member, ...]:
    """The contributors without those that must go so that no evidence is left between two.

    The member that is in doubt with most others goes first. Doubts of late count as well, by the
    word of most members. Colluders may accuse or contradict one honest member after the other: each
    of these is in doubt with all colluders, but the colluders are with all of these.

    Among equals the order is: who was in doubt with more members of late; who accuses again and
    again, by the word of most as well; without whom the rest goes on from the furthest step
    (`reached_step` of their contributions, -1 if layers are lost); newcomers; the highest peer id.
    `bounds` save asking for the step of each.
    """
    staying, bound = dict(heard), None
    accusers, before = known_accusers(heard.values()), dict[str, set[str]]()
    for pair in earlier_doubts(heard.values()):
        for one, other in (pair, pair[::-1]):
            before.setdefault(one, set()).add(other)
    links = [it for it in accusations if it.by in staying and it.of in staying and it.by != it.of]
    while doubts := _in_doubt(links):
        rank = {}
        for member, others in doubts.items():
            of_late = before.get(member.peer_id, set())
            rank[member] = len(others | of_late), len(of_late), member.peer_id in accusers
        most = max(rank.values())
        tied = [it for it in doubts if rank[it] == most]
        if bound is None and bounds is not None and len(tied) > 1:
            bound = bounds(list(staying.values()))
        gone = _needed_least(tied, staying, reached_step, bound)
        links = [it for it in links if gone not in (it.by, it.of)]
        part = staying.pop(gone)
        if bound is not None:
            bound.leaves(part)
    return tuple(sorted(staying))


def _needed_least(
    tied: Sequence[Member],
    staying: Mapping[Member, Contribution],
    reached_step: Callable[[list[Contribution]], int],
    bound: FurthestStep | None,
) -> Member:
    """Which of the `tied` goes. Each `reached_step` takes long where there are many, so it is not
    asked for members that cannot be the one."""
    if len(tied) == 1:
        return tied[0]

    def key(member: Member, step: int) -> tuple[int, bool, Member]:
        return step, staying[member].present is None, member

    def reached(member: Member) -> int:
        return reached_step([part for other, part in staying.items() if other != member])

    if bound is None:
        return max(tied, key=lambda it: key(it, reached(it)))
    least: tuple[int, bool, Member] | None = None
    for at_most in sorted((key(it, bound.without(staying[it])) for it in tied), reverse=True):
        if least is not None and at_most < least:
            break
        step, _, member = at_most
        found = key(member, reached(member) if step > NOWHERE else NOWHERE)
        least = found if least is None else max(least, found)
    assert least is not None
    return least[2]


def _in_doubt(links: Iterable[Accusation]) -> dict[Member, set[str]]:
    """By member with a link in doubt: the peers on the other ends."""
    found: dict[Member, set[str]] = {}
    for it in links:
        found.setdefault(it.by, set()).add(it.of.peer_id)
        found.setdefault(it.of, set()).add(it.by.peer_id)
    return found


def without_newcomers_in_doubt(
    heard: Mapping[Member, Contribution], accusations: Iterable[Accusation]
) -> tuple[dict[Member, Contribution], set[Accusation]]:
    """The contributions that stay for a planned view, and the accusations that are left. A newcomer
    with a link in doubt to a member loses the attempt, and no member loses its place. Keys are made
    for nothing: if two newcomers accuse one member, they have a link in doubt each, and it has two.
    Accusations of newcomers by known accusers go: else one of these could keep all out for good."""
    new = {member for member, part in heard.items() if part.present is None}
    accusers, gone = known_accusers(heard.values()), set[Member]()
    left = {it for it in accusations if not (it.of in new and it.by.peer_id in accusers)}
    for item in left:
        if item.by in heard and item.of in heard and (item.by in new) != (item.of in new):
            gone.add(item.by if item.by in new else item.of)
    return {member: part for member, part in heard.items() if member not in gone}, left


def ends_in_doubt(
    heard: Mapping[Member, Contribution],
    links: Collection[Accusation],
    members: set[Member],
) -> set[Member]:
    """Who has a link in doubt to one of the `members` of a view, and those members. Of two others
    with a link in doubt one, since the other may reach everybody else."""
    beside = {end for it in links if {it.by, it.of} & members for end in (it.by, it.of)}
    between = [it for it in links if not {it.by, it.of} & beside]
    staying = mutually_reachable(heard, between, lambda rest: 0)
    return beside | (heard.keys() - set(staying))


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def known_accusers(contributions: Iterable[Contribution]) -> frozenset[str]:
    """Accusers of others, as more than half of the members among the contributors name them."""
    return _named_by_most(contributions, lambda part: part.accusers)


def earlier_doubts(contributions: Iterable[Contribution]) -> frozenset[Pair]:
    """Which two were in doubt of late, as far as more than half of the members among the
    contributors say so."""
    return _named_by_most(contributions, lambda part: part.doubted)


def _named_by_most(
    contributions: Iterable[Contribution], named: Callable[[Contribution], Iterable[Named]]
) -> frozenset[Named]:
    """What more than half of the members name. Those left out since an older view have no say."""
    members = [part for part in voters(list(contributions)) if part.present is not None]
    counts = Counter(it for part in members for it in set(named(part)))
    return frozenset(it for it, count in counts.items() if 2 * count > len(members))
