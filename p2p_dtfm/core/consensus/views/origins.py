"""What a newcomer's first view comes from, by the word of those who are in it.

So the newcomer belongs to the same part of the swarm as they, should they meet the others again.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from p2p_dtfm.core.membership.familiar_peers import FamiliarPeers
from p2p_dtfm.core.messages.agreement_messages import Contribution, KnownView
from p2p_dtfm.core.protocol.snapshot import ViewId


def origins_of_newcomer(
    parts: Collection[Contribution], familiar: FamiliarPeers, was_in_none: bool
) -> set[KnownView]:
    """The origins that a newcomer takes over from contributors. `was_in_none`: it has been in no
    view yet. Otherwise, where newcomers make a view of their own, it goes by the views that it was
    in itself."""
    founders = origins_of_founders(parts, familiar) if was_in_none else set()
    return origins_by_most(parts) | founders


def origins_by_most(parts: Iterable[Contribution]) -> set[KnownView]:
    """The origins that most of the members say who come from one view."""
    told: dict[ViewId, list[Contribution]] = {}
    for part in parts:
        if part.present is not None:
            told.setdefault(part.present.view, []).append(part)
    found: set[KnownView] = set()
    for said in told.values():
        counts = Counter(origin for part in said for origin in set(part.origins))
        found |= {origin for origin, count in counts.items() if 2 * count > len(said)}
    return found


def origins_of_founders(parts: Iterable[Contribution], familiar: FamiliarPeers) -> set[KnownView]:
    """The origins that familiar newcomers say, where newcomers make a view of their own.

    They may have been in a swarm that none of them reaches. Strangers may name whatever they like,
    so their word does not count.
    """
    parts = list(parts)
    if any(part.present is not None for part in parts):
        return set()
    known = (part for part in parts if familiar.holds(part.member.peer_id))
    return {origin for part in known for origin in part.origins}
