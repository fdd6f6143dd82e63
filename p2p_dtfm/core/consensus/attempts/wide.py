"""What is new to this peer in an attempt of many, and how far this peer has passed it on."""

from collections.abc import Callable, Collection, Mapping, ValuesView
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TypeVar

from p2p_dtfm.core.consensus.overlay.grid import Grid
from p2p_dtfm.core.messages.agreement_messages import Active, Charge, Ready, Synced
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member

Value = TypeVar("Value")
Givers = Mapping[bytes, str]
Item = Signed | Charge | Ready | Synced | Active


class CameFrom(Enum):
    """Where news came from decides who hears of it."""

    OUTSIDE = "this peer itself, or one without a place in the grid: all neighbours hear of it"
    ACROSS = "another row: its own row hears of it"
    ROW = "its own row: only those without a place for whom this peer speaks"


Whence = Callable[[str], CameFrom]
"""Tells where the word of a giver comes from; "" is this peer's own."""
ASKED_AT_ONCE = 2
"""How many neighbours are asked at once for what is missing, others each time."""


def whence(grid: Grid, me: str) -> Whence:
    """Where news came from, by the place of its giver in the grid."""

    def came_from(giver: str) -> CameFrom:
        if giver not in grid.places or me not in grid.places:
            return CameFrom.OUTSIDE
        return CameFrom.ROW if grid.are_row_mates(me, giver) else CameFrom.ACROSS

    return came_from


@dataclass(frozen=True)
class News:
    item: Item
    came_from: CameFrom
    giver: str


@dataclass
class Told:
    """How far the news has been passed on, and to whom."""

    row_at: int = 0
    across_at: int = 0
    across_to: frozenset[str] = frozenset()
    leaf_at: dict[str, int] = field(default_factory=dict)
    row_prepared: set[bytes] = field(default_factory=set)
    """Names of the steps and Prepared that this peer's row has been sent; `across_prepared`: the
    other rows."""
    across_prepared: set[bytes] = field(default_factory=set)
    digest_told: str = ""
    flushed_ns: int | None = None
    is_due: bool = False


@dataclass
class Wide:
    """`news` only grows; `told` keeps how far in it each receiver has been told."""

    hasty: bool = True
    """No attempt has failed before: the knowledge is frozen as soon as nobody is waited for.
    Otherwise all neighbours must first say that they know the same."""
    grid: Grid | None = None
    watchers: dict[str, frozenset[str]] = field(default_factory=dict)
    neighbours: frozenset[str] = frozenset()
    makers: dict[str, Member] = field(default_factory=dict)
    """Makers of contributions, by peer id."""
    news: list[News] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    giver: str = ""
    """Sender of the message that is being read."""
    repairs: int = 0
    leaves: tuple[object, list[str]] | None = None
    hosts: dict[Member, tuple[PeerRecord | None, tuple[str, ...]]] = field(default_factory=dict)
    """Of each peer without a place: its record, and the hosts that follow from that."""

    def not_from_row(self) -> list[Item]:
        """What this peer's row has not been told."""
        return [it.item for it in self.news[self.told.row_at :] if it.came_from is not CameFrom.ROW]

    def from_outside(self) -> list[Item]:
        """What the other rows have not been told."""
        return [
            it.item for it in self.news[self.told.across_at :] if it.came_from is CameFrom.OUTSIDE
        ]

    def for_leaf(self, leaf: str) -> list[Item]:
        """What a peer without a place has not been told and has not given; from now on it counts as
        told."""
        begin, self.told.leaf_at[leaf] = self.told.leaf_at.get(leaf, 0), len(self.news)
        return [it.item for it in self.news[begin:] if it.giver != leaf]

    def note(
        self,
        kind: str,
        items: ValuesView[Item],
        came_from: Whence,
        me: str,
        givers: Givers | None = None,
    ) -> None:
        """Note what is new of a kind. `items` are all of that kind in their order: those beyond the
        ones that were noted before are new.

        `givers`: by signature, who gave a contribution. It may come to count only later, by what
        another peer gives.
        """
        before = self.counts.get(kind, 0)
        if len(items) == before:
            return
        new = list(islice(items, before, None))
        self.counts[kind] = before + len(new)
        for item in new:
            giver = self.giver
            if givers and isinstance(item, Signed):
                giver = givers.get(item.signature, giver)
            if _maker(item) == me:
                giver = ""
            self.news.append(News(item, came_from(giver), giver))


def _maker(item: Item) -> str:
    if isinstance(item, Signed):
        return item.peer_id
    return item.accusation.by.peer_id if isinstance(item, Charge) else item.sender.peer_id


def fullest(sets: Collection[list[Value]], limit: int) -> list[list[Value]]:
    """As many of the lists as `limit` says, those with the most in them."""
    return list(sets) if len(sets) <= limit else sorted(sets, key=len, reverse=True)[:limit]
