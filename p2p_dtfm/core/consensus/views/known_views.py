"""Views that a peer can vouch for itself: a claim about any other one needs proof.

It knows the views to which it said Ready in this life, those that it was in (in earlier lives too),
and those that its own came from. It also knows a view whose Ready set is signed by more than half
of the members of a view that it knows.
"""

from collections.abc import Iterable
from typing import NamedTuple

from p2p_dtfm.core.consensus.views.fellows_views import FellowsViews
from p2p_dtfm.core.membership.familiar_peers import FamiliarPeers
from p2p_dtfm.core.messages.agreement_messages import Contribution, KnownView, PresentView
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.message_bounds import ORIGINS_LIMIT
from p2p_dtfm.core.messages.statements import all_signed, signers
from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View

REMEMBERED_VIEWS = 64
"""How many views are remembered of those that this peer said Ready to, and of those proven to
it."""
RECENT_VIEWS = 32
RARE_VIEWS = 4
ORIGINS_MEMBERS_LIMIT = 64
"""Newcomers are told of up to `ORIGINS_LIMIT` views with at most this many members in all; of the
newest in any case."""
RANKS = 24
"""Of its history a peer keeps the newest views and, of older ones, `RARE_VIEWS` for each rank: the
older, the fewer. A view's rank follows from its id, so two parts of a swarm that were apart for
long keep the same ones."""


class Sources(NamedTuple):
    """What a view that this peer has said Ready to comes from."""

    views: tuple[KnownView, ...]
    is_news: bool
    """The peer came as a newcomer."""
    came_from: frozenset[ViewId] = frozenset()
    """The views that its contributors were in."""


class KnownViews:
    """`history` outlives this peer's lives; the rest does not.

    The history holds ancestors of the present view only. Parts of a split swarm are compared by
    what both come from. A peer that counted views which it has left would go to and fro.
    """

    def __init__(self, history: Iterable[KnownView] = ()) -> None:
        self._history = {item.view: item for item in history}
        self._readied: dict[ViewId, KnownView] = {}
        self._certified: dict[ViewId, KnownView] = {}
        self._sources: dict[ViewId, Sources] = {}
        self._agreed: set[ViewId] = set()
        """Of the views to which this peer has said Ready: those to which all have."""
        self._came_from: frozenset[ViewId] = frozenset()
        """The views that the present view's makers were in before."""
        self._has_left_all = False
        self._trains: dict[ViewId, None] = {}
        """Views that this peer has seen a plan of: nobody was in them without one."""
        self._proven: dict[int, tuple[PresentView, KnownView, frozenset[Member]]] = {}
        """By the identity of what a contributor says of its view, which many share: that object,
        the view as this peer knows it, and the members whose word fits."""
        self.of_fellows = FellowsViews()
        self._trim()

    def begin_life(self) -> None:
        self._readied, self._certified, self._sources = {}, {}, {}
        self._agreed, self._came_from = set(), frozenset()
        self.of_fellows = FellowsViews()

    @property
    def history(self) -> tuple[KnownView, ...]:
        """The views that this peer was in, and those from which they came, oldest first."""
        return tuple(self._history.values())

    @property
    def highest_number(self) -> int:
        """The highest number of the history. Whoever goes on alone opens a view with a higher one.
        So numbers tell which of two views came first, also where all of a swarm has ended between
        them."""
        return max((view.number for view in self._history), default=0)

    @property
    def told(self) -> tuple[ViewId, ...]:
        """The views that others are told of, the newest first."""
        return tuple(reversed(self._history))

    def says_ready(
        self, view: View, sources: Iterable[ViewId], origins: Iterable[KnownView] | None = None
    ) -> None:
        """This peer says Ready to a view. `sources`: the views that its contributors come from.
        Members that let a newcomer in make it a part of what they are part of: where the swarm was
        split before, it goes along with them. `origins`, of a newcomer: what those views come from
        (`views.origins`)."""
        came_from = frozenset(sources)
        found = (self.find(source) for source in came_from)
        before = (*(origins or ()), *(known for known in found if known is not None))
        self._sources[view.id] = Sources(before, origins is not None, came_from)
        self._readied[view.id] = _known(view)
        self._note_plan(view)
        self._trim()

    def takes_over(self, view: View) -> None:
        """The view takes over. A newcomer may have been in another part before: views of that part
        are none of its ancestors any more."""
        sources = self._sources.get(view.id, Sources((), is_news=False))
        self._came_from = sources.came_from
        before = {known.view: known for known in sources.views}
        if sources.is_news and (common := before.keys() & self._history.keys()):
            newest, known = max(common), self._history.items()
            self._history = {at: it for at, it in known if at <= newest or at in before}
        held = {**before, **self._history}
        self._history = {at: held[at] for at in sorted(held) if at != view.id}
        self._history[view.id] = _known(view)
        self._note_plan(view)
        self.of_fellows = FellowsViews()
        self._trim()

    def _note_plan(self, view: View) -> None:
        if isinstance(view.plan, Plan):
            self._trains[view.id] = None
            for oldest in list(self._trains)[:-REMEMBERED_VIEWS]:
                del self._trains[oldest]

    def origins(self, members: Iterable[Member]) -> tuple[KnownView, ...]:
        """For each peer that is not among `members`: the newest view that this peer was in with it.
        Of these views, the newest are named.

        Such peers may make up another part of the swarm, and have left some of these views for
        older ones. So one view alone need not be what both parts come from.
        """
        met = {member.peer_id for member in members}
        found: list[KnownView] = []
        named_count = 0
        for known in reversed(self._history.values()):
            if known.peer_ids <= met:
                continue
            named_count += len(known.members)
            if len(found) == ORIGINS_LIMIT or (found and named_count > ORIGINS_MEMBERS_LIMIT):
                break
            found.append(known)
            met |= known.peer_ids
        return tuple(found)

    def leaves(self, common: KnownView | None) -> None:
        """This peer goes over to a part of the swarm that has had nothing in common with its own
        since `common`. Views after that are no ancestors of the view that it will be in."""
        self._has_left_all |= common is None
        for view in [view for view in self._history if common is None or view > common.view]:
            del self._history[view]

    def may_have_forgotten(self, was: Member) -> bool:
        """Whether this peer, as `was`, may have been in views that it does not know of any more. It
        may if it lived before all that it remembers, and has not left another swarm since."""
        members = (member for known in self._history.values() for member in known.members)
        lives = [member.life for member in members if member.peer_id == was.peer_id]
        return not self._has_left_all and was.life < min(lives, default=0)

    def recalls(self, known: KnownView) -> None:
        """Recall a view that this peer had forgotten: others hear of it from now on."""
        held = {**self._history, known.view: known}
        self._history = {at: held[at] for at in sorted(held)}
        self._trim()

    def goes_back(self, known: KnownView) -> None:
        """This peer goes back to those with whom it was in a view that it had forgotten. Nothing
        that it has been in since comes from that view."""
        self._history = {known.view: known}

    def has_come_from(self, view: ViewId) -> bool:
        """Whether `view` is an ancestor of the present view, or the present view itself."""
        return view in self._history

    def has_gone_by(self, view: ViewId) -> bool:
        """Whether this peer has agreed on the view, and not taken it over."""
        return view in self._readied and view not in self._history

    def has_readied(self, view: ViewId) -> bool:
        return view in self._readied

    def find(self, view: ViewId) -> KnownView | None:
        for known in (self._readied, self._history, self._certified):
            if view in known:
                return known[view]
        return None

    def has_met(self, peer_id: str, present: ViewId) -> bool:
        """Whether `peer_id` is in a view that this peer was in, or may yet be in."""
        later = (*self._readied.values(), *self._certified.values())
        known = (*self._history.values(), *(it for it in later if present < it.view))
        return any(peer_id == member.peer_id for it in known for member in it.members)

    @property
    def certified(self) -> frozenset[ViewId]:
        """Views that were proven to this peer, in which it was not."""
        return frozenset(self._certified)

    def is_proven(self, part: Contribution) -> bool:
        """Whether what a contributor says of its view is known to be so."""
        present = part.present
        known = self.find(present.view) if present is not None else None
        if present is None or known is None:
            return False
        held = self._proven.get(id(present))
        if held is None or held[0] is not present or held[1] is not known:
            if present.plan is None:
                plan_fits = present.view not in self._trains
            else:
                plan_fits = present.plan.digest() == known.plan_digest
            is_so = plan_fits and present.members == known.members
            if len(self._proven) >= REMEMBERED_VIEWS:
                self._proven.clear()
            members = frozenset(known.members if is_so else ())
            held = self._proven[id(present)] = present, known, members
        return part.member in held[2]

    def counts_for_all(self, named: ViewId, present: ViewId) -> bool:
        """Whether who says that it is in this view is believed by all members of the `present` one.

        All know the views from which those came that made the present view: somebody may not have
        taken it over. Of others, older ones, newer members may know nothing. A later view counts
        once it is seen that all have agreed on it. Perhaps only some have said Ready to it, and
        those alone would believe in it.
        """
        if named == present or named in self._came_from:
            return True
        later = [it for it in (*self._readied, *self._certified) if present < it]
        agreed = [it for it in later if self.is_agreed(it)]
        sources = (self._sources[it].came_from for it in agreed if it in self._sources)
        return named in agreed or any(named in came_from for came_from in sources)

    def is_agreed(self, view: ViewId) -> bool:
        """Whether all that were to agree on a view have done so, as far as this peer has seen."""
        return view in self._agreed or view in self._certified or view in self._history

    def note_agreed(self, view: ViewId) -> None:
        """All have said Ready to a view, this peer among them."""
        if view in self._readied:
            self._agreed.add(view)

    def see_agreed(self, certificate: Certificate, verify: Verify) -> bool:
        """Whether a certificate shows that all have said Ready to the view of its id, as this peer
        knows that."""
        told = KnownView(certificate.view, certificate.members, certificate.plan_digest)
        if self.find(certificate.view) != told or not all_signed(certificate, verify):
            return False
        self.note_agreed(certificate.view)
        return True

    def learn(self, certificate: Certificate, present: ViewId, verify: Verify) -> bool:
        """Learn a view after the `present` one, if most members of one that is known have signed
        it.

        A view to which this peer has only said Ready may never have come to be, and keys made for
        nothing may be most of it. It leads to no other before it is seen to be agreed on: other
        members may not even have said Ready to it.
        """
        number = certificate.view.number
        if self.find(certificate.view) is not None or number <= present.number:
            return False
        here = self._history.get(present)
        later = (*self._readied.values(), *self._certified.values())
        known = {it.view: it for it in later if present < it.view and self.is_agreed(it.view)}
        if here is not None:
            known[present] = here
        for root in known.values():
            said = signers(certificate, verify, root.peer_ids) if root.view.number < number else ()
            if 2 * len(set(said) & set(root.members)) > len(root.members):
                return self._certify(certificate)
        return False

    def forget_certified(self) -> dict[ViewId, KnownView]:
        """Forget the proven views, and return them. A newcomer takes the side of those that let it
        in, in each attempt anew."""
        before, self._certified = self._certified, {}
        return before

    def unless_news(self, before: dict[ViewId, KnownView]) -> None:
        """If nothing was proven since, all is as `before`: somebody may only send certificates."""
        self._certified = self._certified or before

    def learn_earlier(self, certificate: Certificate, verify: Verify) -> bool:
        """For a newcomer: learn a view if most of its members, by their signatures, are in one
        proven view."""
        said = signers(certificate, verify) & set(certificate.members)
        roots = self._certified.values()
        if any(2 * len(said & set(it.members)) > len(certificate.members) for it in roots):
            return self._certify(certificate)
        return False

    def trust(self, certificate: Certificate, verify: Verify, familiar: FamiliarPeers) -> bool:
        """A newcomer knows no view. It takes the word of all members of one, if they signed it and
        it knows one of them, or nobody at all."""
        if self.find(certificate.view) is not None:
            return True
        if not familiar.is_empty and not familiar.any_of(m.peer_id for m in certificate.members):
            return False
        is_shown = bool(certificate.members) and all_signed(certificate, verify)
        return is_shown and self._certify(certificate)

    def newest_common(self, theirs: Iterable[ViewId]) -> KnownView | None:
        """Of the ancestors of this peer's view, the newest that is among `theirs`."""
        both = [view for view in theirs if view in self._history]
        return self._history[max(both)] if both else None

    def _certify(self, certificate: Certificate) -> bool:
        known = KnownView(certificate.view, certificate.members, certificate.plan_digest)
        self._certified[certificate.view] = known
        self._trim()
        return True

    def _trim(self) -> None:
        for known in (self._readied, self._certified):
            while len(known) > REMEMBERED_VIEWS:
                del known[next(iter(known))]
        for view in self._sources.keys() - self._readied.keys():
            del self._sources[view]
        self._agreed &= self._readied.keys()
        if len(self._history) > RECENT_VIEWS:
            kept = _kept(tuple(self._history))
            self._history = {view: it for view, it in self._history.items() if view in kept}


def _kept(views: tuple[ViewId, ...]) -> set[ViewId]:
    """Of views in their order: the newest, the first, and some in between."""
    kept = {views[0], *views[-RECENT_VIEWS:]}
    left = dict.fromkeys(range(RANKS), RARE_VIEWS)
    for view in reversed(views[1:-RECENT_VIEWS]):
        wanted = [rank for rank in range(_rank(view) + 1) if left[rank]]
        if wanted:
            kept.add(view)
        for rank in wanted:
            left[rank] -= 1
    return kept


def _rank(view: ViewId) -> int:
    """One view in 2^rank has this rank or a higher one."""
    bits = int(digest(view)[:16], 16)
    return min(RANKS - 1, 64 - bits.bit_length())


def _known(view: View) -> KnownView:
    return KnownView(view.id, view.members, view.plan.digest())
