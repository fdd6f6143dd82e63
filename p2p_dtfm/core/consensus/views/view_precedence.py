"""Which of two views counts, where parts of a split swarm meet.

What counts first is who stands behind a view. These are members of the last view that both sides
had in common, each by its signature, or by those that it left behind (`voices`). Only between
equals does length decide, as the last commit proves it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from p2p_dtfm.core.consensus.views.voices import SIGNERS_LIMIT, voices_of
from p2p_dtfm.core.messages.agreement_messages import KnownView, Standing
from p2p_dtfm.core.messages.prepared import open_prepared
from p2p_dtfm.core.messages.statements import signers
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import epochs_of
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.protocol.snapshot import Member, ViewId

LENGTHS_ALIKE = 1
"""Lineages whose lengths differ by no more count as equally long: a step is always under way, and
two parts must not both take the other for the longer one."""
END_SHOWN_BY = 3
"""How many members, or most of fewer, show a newcomer that the run is complete."""
Named = TypeVar("Named")


@dataclass(frozen=True)
class Side:
    """One of two views that have met. `support`: the peers that stand behind it, of those that
    count. `signed`: all members whose signatures of it were looked at, and hold."""

    has_plan: bool
    support: frozenset[str]
    step: int
    view: ViewId
    signed: frozenset[str] = frozenset()
    last: Mapping[str, int] = field(default_factory=dict)
    """Of each supporter: the number of the view that it signed last on this side, if not of this
    one."""
    epoch: int = 0
    """How often what a liar had done was taken back on this side, as the last commit shows it."""

    def count(self, other: "Side") -> int:
        """How many supporters count for this side: those that have signed the other side as late,
        or later, do not."""
        shared = self.support & other.support
        return len(self.support) - sum(self._number(it) <= other._number(it) for it in shared)

    def _number(self, name: str) -> int:
        return self.last.get(name, self.view.number)


def outranks(one: Side, other: Side) -> bool:
    """Whether `one` counts more than `other`.

    The first of these in which they differ decides: a side that trains, more support, more often
    taken back what liars did, the longer lineage, the higher view id.
    """
    if one.has_plan != other.has_plan:
        return one.has_plan
    counts = one.count(other), other.count(one)
    if counts[0] != counts[1]:
        return counts[0] > counts[1]
    if one.epoch != other.epoch:
        return one.epoch > other.epoch
    if abs(one.step - other.step) > LENGTHS_ALIKE:
        return one.step > other.step
    return one.view > other.view


def side_of(
    standing: Standing,
    common: KnownView | None,
    min_members: int,
    verify: Verify,
    given: frozenset[str] = frozenset(),
) -> Side | None:
    """What a Standing comes to, by what it proves; None if it proves nothing.

    Support is from the members of the `common` view; without one, from all who have signed. Of
    other members only the signatures of `given` are looked at.
    """
    certificate = standing.certificate
    among = None if common is None else common.peer_ids | {standing.sender.peer_id} | given
    said = signers(certificate, verify, among)
    if standing.sender not in certificate.members or standing.sender not in said:
        return None
    if common is not None and _may_have_voices(standing, common):
        said = signers(certificate, verify)
    has_plan = standing.has_plan and len(certificate.members) >= min_members
    names = frozenset(member.peer_id for member in said)
    voices = _voices(standing, names, common, verify)
    epoch, step = _proven(standing, verify, _known(common))
    return Side(has_plan, frozenset(voices), step, standing.view, names, voices, epoch)


def own_side(standing: Standing, common: KnownView | None) -> Side:
    """The same of this peer's own view, whose signatures it has checked."""
    said = frozenset(member.peer_id for member, _ in standing.certificate.ready)
    voices = _voices(standing, said, common, lambda *_: True)
    epoch, step = _proven(standing, lambda *_: True, _known(common))
    return Side(standing.has_plan, frozenset(voices), step, standing.view, said, voices, epoch)


def _may_have_voices(standing: Standing, common: KnownView) -> bool:
    """Whether the Standing names a peer of the common view that is gone: only then its signatures
    are worth a look."""
    ready = standing.certificate.ready
    if not standing.farewells or len(ready) > SIGNERS_LIMIT:
        return False
    said = frozenset(member.peer_id for member, _ in ready)
    return bool((voices_of(standing, said, lambda *_: True).keys() - said) & common.peer_ids)


def _voices(
    standing: Standing, said: frozenset[str], common: KnownView | None, verify: Verify
) -> dict[str, int]:
    """Who stands behind the Standing's view, with the number of the view that each signed last.
    Without a common view a leaver stands behind nothing, though it signs."""
    if common is None:
        return dict.fromkeys({it.peer_id for it in standing.members} & said, standing.view.number)
    voices = dict.fromkeys(said, standing.view.number)
    if _may_have_voices(standing, common):
        voices = voices_of(standing, said, verify)
    return {name: number for name, number in voices.items() if name in common.peer_ids}


def proven_step(standing: Standing, verify: Verify, known: Collection[str] = frozenset()) -> int:
    """How far a view has come, by the Prepared of its last commit; without a plan, by what its
    Standing says.

    Whoever held the stages may be gone since. So Prepared of `known` count as well: of those that
    were in the view before both.
    """
    return _proven(standing, verify, known)[1]


def _proven(standing: Standing, verify: Verify, known: Collection[str]) -> tuple[int, int]:
    """In which epoch the view is, and how far it has come there."""
    if not standing.has_plan:
        return 0, standing.step
    believed = {member.peer_id for member in standing.members} | set(known)
    ends = []
    for signed in standing.commit:
        try:
            prepared = open_prepared(signed, verify)
        except PeerFault:
            return 0, 0
        if signed.peer_id in believed:
            ends.append((epochs_of(prepared.base).number, prepared.step + 1))
    epoch, committed = min(ends, default=(0, 0))
    # a peer without a stage knows of a step more, or one less, than it can show
    return epoch, min(standing.step, committed + LENGTHS_ALIKE)


def _known(common: KnownView | None) -> frozenset[str]:
    return frozenset() if common is None else common.peer_ids


def shows_end(standing: Standing, total_steps: int, verify: Verify) -> bool:
    """Whether the Prepared that the Standing has, by members of its view, are of the run's last
    step. It does not hold the plan, which says who has a stage there: one member can show this
    alone."""
    return standing.has_plan and proven_step(standing, verify) > total_steps


def is_shown_by_most(shown_by: Collection[Named], members: Collection[Named]) -> bool:
    """Whether so many have shown it that it counts: most of few, or some of very many."""
    return len(set(shown_by) & set(members)) >= min(len(members) // 2 + 1, END_SHOWN_BY)


def gone_on(standing: Standing, number: int, members: Collection[Member]) -> set[Member]:
    """Members that gather under this number, and are in the later view of a Standing whose members
    have all signed. They have passed the number for good, and so has a life that has ended."""
    if standing.view.number <= number:
        return set()
    lives = {member.peer_id: member.life for member in standing.members}
    return {it for it in members if lives.get(it.peer_id, it.life - 1) >= it.life}
