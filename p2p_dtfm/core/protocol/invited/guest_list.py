"""Who is let into a run by invitation: peers whose chain from the founder nobody took back."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.invited.chains import (
    LINK_BYTES,
    NOT_INVITED,
    SKEW_S,
    Chain,
    Revocation,
    holders_of,
    is_accepted,
    open_chain,
    open_revocation,
    open_shown,
    size_of,
)
from p2p_dtfm.core.protocol.signed import Signed, Verify

GUESTS_LIMIT = 4096
TOLD_OF_LIMIT = GUESTS_LIMIT // 2
"""With so many guests known, no further one is remembered by the word of others, unless it has been
in a view."""
OTHERS_LIMIT = 256
"""Guests of which a second chain is remembered."""
HANDED_ON_LIMIT = 256
HANDED_ON_BYTES = 256 << 10
REVOCATIONS_LIMIT = 1024
UNKNOWN_LIMIT = 64
"""Revocations kept of keys that, as far as is known, have nothing to take back. Their chains may be
heard of later."""


_UNKNOWN = ""


class SavedGuests(msgspec.Struct, frozen=True):
    """What outlives the daemon: a guest that came in before its line expired may come back."""

    guests: dict[str, tuple[Signed, ...]] = {}
    revocations: tuple[Signed, ...] = ()
    others: dict[str, tuple[Signed, ...]] = {}
    """Second chains by which some guests have come."""


class _GuestWay(NamedTuple):
    """A way by which a peer has come: what it shows, and the chain in that."""

    shown: tuple[Signed, ...]
    chain: Chain


class GuestList:
    """The guests of one run, as one member knows them. Times are arguments, in Unix seconds."""

    def __init__(self, founder: str, run_digest: str, verify: Verify) -> None:
        self.founder = founder
        self.members = frozenset[str]()
        """Members of the present views. Their chains are not forgotten: otherwise a guest that lets
        in thousands of keys could stay for good, whatever is taken back."""
        self._run_digest = run_digest
        self._verify = verify
        self._ways: dict[str, _GuestWay] = {}
        self._others: dict[str, _GuestWay] = {}
        """A second way by which a peer has come. This member may hear of the first way before it
        hears that this was taken back. A peer is in if one of its two ways lets it in."""
        self._unsigned: dict[str, _GuestWay] = {}
        """Ways from the home of an earlier version, which the peers have not signed. They say that
        a peer has come before, and let nobody in."""
        self._revocations: dict[tuple[str, str], tuple[Revocation, Signed]] = {}
        self._speakers: dict[str, str] | None = None
        """The result of `_lines_by_speaker`; None where chains have changed since."""
        self._counts: Counter[str] | None = None
        """Revocations by line; None where something has changed since."""

    def introduce(
        self, peer_id: str, shown: tuple[Signed, ...], now_s: int, came_before: bool = False
    ) -> None:
        """A peer shows the chain by which it comes. `came_before`: the peer is or was in a view, so
        others have let it in while its line held. If the peer is refused now, that does not help it
        in by a closed line. Raises `PeerFault` with the reason in words.

        A peer that is in by another chain need not have heard that this one was taken back."""
        if peer_id == self.founder:
            return
        chain = open_shown(shown, self.founder, self._run_digest, peer_id, self._verify)
        ways = (*self._ways_of(peer_id), self._unsigned.get(peer_id))
        before = [way.chain.holders for way in ways if way is not None]
        is_by_this = chain.holders in before
        is_guest = is_by_this or (came_before and self.refusal(peer_id) is None)
        reason = self._taken_back(chain.holders, is_guest)
        if reason is None and not (is_by_this or came_before):
            reason = _why_late(chain, now_s)
        if reason is None:
            self._remember(peer_id, _GuestWay(shown, chain))
        elif not self.admits(peer_id):
            raise PeerFault(f"{NOT_INVITED}: {reason}", peer_id)

    def told_of(self, shown: tuple[Signed, ...], came_before: bool = False) -> bool:
        """A member shows the chain by which another peer has come, perhaps long ago. Returns
        whether this is news. A chain that was taken back since, or a closed line, is none. Of a
        peer that was let in anew, the earlier chain may be told as well. `came_before`: that peer
        is or was in a view, and there is room for its chain. Raises `PeerFault`."""
        holders = holders_of(shown)
        peer_id, is_in = holders[-1], self.admits(holders[-1])
        is_known = came_before or peer_id in self._ways
        has_room = is_known or len(self._ways) < TOLD_OF_LIMIT
        if peer_id == self.founder or not has_room:
            return False
        if is_in and not self._is_of_use(peer_id, holders):  # checking signatures costs more
            return False
        chain = open_shown(shown, self.founder, self._run_digest, peer_id, self._verify)
        if self._taken_back(chain.holders, is_guest=False) is not None:
            return False
        if is_in:
            self._remember_other(peer_id, _GuestWay(shown, chain))
        else:
            self._remember(peer_id, _GuestWay(shown, chain))
        return True

    def handed_on(self) -> tuple[tuple[Signed, ...], ...]:
        """Chains of guests, for a peer that is new. First come guests that have taken something
        back: without their chains their revocations count for nothing. Then come the newest ones,
        one by each of the founder's lines in turn: by one of them thousands of keys may come."""
        givers, place = {giver for giver, _ in self._revocations}, dict[str, tuple[bool, int]]()
        counts = Counter[str]()
        for peer_id, way in reversed(self._ways.items()):
            place[peer_id] = peer_id not in givers, counts[way.chain.holders[0]]
            counts[way.chain.holders[0]] += 1
        newest = sorted(place, key=lambda peer_id: place[peer_id])
        ways = [self._ways[peer_id] for peer_id in newest]
        ways += [self._others[peer_id] for peer_id in newest if peer_id in self._others]
        found, size_bytes = [], 0
        for shown, _ in ways[:HANDED_ON_LIMIT]:
            size_bytes += sum(map(size_of, shown))
            if size_bytes > HANDED_ON_BYTES:
                break
            found.append(shown)
        return tuple(found)

    def _remember(self, peer_id: str, way: _GuestWay) -> None:
        """Makes `way` the peer's first way. An earlier one may be kept as its second."""
        before, self._ways[peer_id] = self._ways_of(peer_id), way
        for known in (self._others, self._unsigned):
            known.pop(peer_id, None)
        for each in before:
            if self._is_of_use(peer_id, each.chain.holders):
                self._remember_other(peer_id, each)
        self._speakers = self._counts = None
        if len(self._ways) > GUESTS_LIMIT:
            oldest = self._to_forget(self._ways)
            del self._ways[oldest]
            self._others.pop(oldest, None)

    def _remember_other(self, peer_id: str, way: _GuestWay) -> None:
        self._others[peer_id] = way
        self._speakers = self._counts = None
        if len(self._others) > OTHERS_LIMIT:
            del self._others[self._to_forget(self._others)]

    def _is_of_use(self, peer_id: str, holders: tuple[str, ...]) -> bool:
        """Whether a chain of these holders is a better second way than the known one, if any. Best
        is one that shares no inviting peer with the first way, then a short one: each peer that
        invites may take back what it gave."""
        first, held = self._ways[peer_id].chain.holders, self._others.get(peer_id)

        def how_bad(holders: tuple[str, ...]) -> tuple[bool, int]:
            return not set(holders[1:-1:2]).isdisjoint(first[1:-1:2]), len(holders)

        if holders == first or self._taken_back(holders, is_guest=True) is not None:
            return False
        is_held = held is not None and self._taken_back(held.chain.holders, is_guest=True) is None
        return held is None or not is_held or how_bad(holders) < how_bad(held.chain.holders)

    def _to_forget(self, known: Mapping[str, _GuestWay]) -> str:
        """The peer to forget first: the oldest that is no member, of those by the founder's line by
        which most have come. Whoever has a line makes any number of keys, and an absent guest by
        another line may not come in anew. If all are members, it is the oldest."""
        others = [peer_id for peer_id in known if peer_id not in self.members]
        counts = Counter(known[peer_id].chain.holders[0] for peer_id in others)
        fullest = max(counts, key=counts.__getitem__, default="")
        by_it = (it for it in others if known[it].chain.holders[0] == fullest)
        return next(by_it, next(iter(known)))

    def _ways_of(self, peer_id: str) -> list[_GuestWay]:
        found = (self._ways.get(peer_id), self._others.get(peer_id))
        return [way for way in found if way is not None]

    def admits(self, peer_id: str) -> bool:
        """Whether the peer has been let in and that still holds."""
        if peer_id == self.founder:
            return True
        return peer_id in self._ways and self.refusal(peer_id) is None

    def refusal(self, peer_id: str) -> str | None:
        """Why a peer, which may have been in, is out; None if nothing is known against it."""
        if chains := self.chains_of(peer_id):
            reasons = [self._taken_back(chain.holders, is_guest=True) for chain in chains]
            return None if None in reasons else reasons[0]
        return self._word_against(peer_id, {self.founder}, is_guest=True)

    def words_against(self, peer_id: str) -> tuple[Signed, ...]:
        """The revocations of this peer, and of those above it in its chains."""
        holders = {peer_id}.union(*(chain.holders for chain in self.chains_of(peer_id)))
        held = self._revocations.items()
        return tuple(signed for (_, holder), (_, signed) in held if holder in holders)

    def revoke(self, signed: Signed) -> bool:
        """Takes a revocation, and returns whether it is news and is kept. Raises `PeerFault` for
        one that nobody relays in good faith."""
        said = decode(signed.payload, Revocation, LINK_BYTES)
        key = (signed.peer_id, said.holder)
        held = self._revocations.get(key)
        if held is not None and not (held[0].stays_for_guests and not said.stays_for_guests):
            return False
        if held is None and not self._has_room_for(signed.peer_id):
            return False
        revocation = open_revocation(signed, self._run_digest, self._verify)
        if revocation.holder == self.founder:
            raise PeerFault("revokes the founder", signed.peer_id)
        self._revocations[key] = revocation, signed
        self._counts = None
        self._make_room()
        return key in self._revocations

    def _has_room_for(self, giver: str) -> bool:
        """Whether one more revocation of this giver would stay. This is asked before its signature
        is checked, which costs more. `_make_room` decides in the end."""
        by = self._lines_by_speaker()
        account = by.get(giver, _UNKNOWN)
        if self._counts is None:
            self._counts = Counter(by.get(each, _UNKNOWN) for each, _ in self._revocations)
        counts = self._counts
        is_full = len(self._revocations) >= REVOCATIONS_LIMIT
        if account == _UNKNOWN:
            return not is_full and counts[_UNKNOWN] < UNKNOWN_LIMIT
        if account == self.founder or not is_full:
            return True
        others = (n for it, n in counts.items() if it not in (account, self.founder))
        return counts[_UNKNOWN] > 0 or counts[account] < max(others, default=0)

    def _make_room(self) -> None:
        """Drops a revocation where there are too many. Room is shared between the founder's lines,
        by which the givers have come. The line with most revocations loses its newest; the
        founder's own go last of all."""
        by = self._lines_by_speaker()
        accounts: dict[str, list[tuple[str, str]]] = {}
        for giver, holder in self._revocations:
            accounts.setdefault(by.get(giver, _UNKNOWN), []).append((giver, holder))
        unknown = accounts.pop(_UNKNOWN, [])
        if len(unknown) > UNKNOWN_LIMIT:
            del self._revocations[unknown.pop()]
        if len(self._revocations) <= REVOCATIONS_LIMIT:
            return
        founders = accounts.pop(self.founder, [])
        fullest = unknown or max(accounts.values(), key=len, default=founders)
        del self._revocations[fullest[-1]]

    def _lines_by_speaker(self) -> dict[str, str]:
        """The founder's line to each peer that has invited or may invite, and so may take something
        back. A line's own key takes nothing back: all that were given the line have that key."""
        if self._speakers is None:
            found = {self.founder: self.founder}
            for chain in self._all_chains():
                last = len(chain.holders) - (0 if chain.may_invite else 1)
                for peer_id in chain.holders[1:last:2]:
                    found.setdefault(peer_id, chain.holders[0])
            self._speakers = found
        return self._speakers

    def chain_of(self, peer_id: str) -> Chain | None:
        """The chain that a peer has shown last, or that others have told of it first."""
        way = self._ways.get(peer_id)
        return None if way is None else way.chain

    def shown_by(self, peer_id: str) -> tuple[Signed, ...]:
        """What a peer has shown last, or what others have told of it first; empty if nothing."""
        way = self._ways.get(peer_id)
        return () if way is None else way.shown

    def shown_that_holds(self, peer_id: str) -> tuple[Signed, ...]:
        """The same, or by what else the peer has come where that was taken back; empty if nothing
        holds."""
        ways = self._ways_of(peer_id)
        held = (it for it in ways if self._taken_back(it.chain.holders, is_guest=True) is None)
        return next((way.shown for way in held), ())

    def chains_of(self, peer_id: str) -> tuple[Chain, ...]:
        return tuple(way.chain for way in self._ways_of(peer_id))

    def _all_chains(self) -> Iterator[Chain]:
        for way in (*self._ways.values(), *self._others.values()):
            yield way.chain

    def may_revoke(self, giver: str, holder: str) -> bool:
        """Whether `giver` may revoke `holder`, by the chains known here. The founder may revoke
        everybody, others those that they have invited."""
        above = (
            c.holders[1 : c.holders.index(holder) : 2]
            for c in self._all_chains()
            if holder in c.holders
        )
        return giver == self.founder or any(giver in holders for holders in above)

    @property
    def revocations(self) -> tuple[Signed, ...]:
        """All revocations, in the order in which they came."""
        return tuple(signed for _, signed in self._revocations.values())

    def saved(self) -> SavedGuests:
        shown, others = (
            {peer_id: way.shown for peer_id, way in known.items()}
            for known in (self._ways, self._others)
        )
        earlier = {peer_id: way.shown for peer_id, way in self._unsigned.items()}
        return SavedGuests(earlier | shown, self.revocations, others)

    def restore(self, saved: SavedGuests) -> None:
        """Takes over what this home wrote down; what no longer holds is left out."""
        whose, verify = (self.founder, self._run_digest), self._verify
        newest = dict(list(saved.others.items())[-OTHERS_LIMIT:])
        for guests, known in ((saved.guests, self._ways), (newest, self._others)):
            for peer_id, shown in guests.items():
                is_signed = is_accepted(shown)
                try:
                    opened = (open_shown if is_signed else open_chain)(
                        shown, *whose, peer_id, verify
                    )
                except PeerFault:
                    continue
                (known if is_signed else self._unsigned)[peer_id] = _GuestWay(shown, opened)
        self._unsigned = dict(list(self._unsigned.items())[-OTHERS_LIMIT:])
        for signed in saved.revocations[:REVOCATIONS_LIMIT]:
            try:
                self.revoke(signed)
            except PeerFault:
                continue

    def closed_to_new(self, chain: Chain) -> str | None:
        """Why nobody new comes in below this chain, though a peer that has it may stay; None if
        that is open."""
        return self._taken_back(chain.holders, is_guest=False)

    def _taken_back(self, holders: tuple[str, ...], is_guest: bool) -> str | None:
        """Why a chain was taken back; None if it holds. Each peer above a holder in the chain may
        take back what the holder was given."""
        above = {self.founder}
        for place, holder in enumerate(holders):
            if (reason := self._word_against(holder, above, is_guest)) is not None:
                return reason
            if place % 2:
                above.add(holder)
        return None

    def _word_against(self, holder: str, above: set[str], is_guest: bool) -> str | None:
        for giver in sorted(above):
            held = self._revocations.get((giver, holder))
            if held is not None and not (held[0].stays_for_guests and is_guest):
                who = "the founder" if giver == self.founder else giver
                return f"the invitation was revoked by {who}"
        return None


def _why_late(chain: Chain, now_s: int) -> str | None:
    """Why nobody comes in by a chain any more; None while its lines last."""
    if now_s <= chain.expires_s + SKEW_S:
        return None
    return f"the invitation expired {_about(now_s - chain.expires_s)} ago, by this clock"


def _about(seconds: int) -> str:
    for unit_s, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= unit_s:
            count = seconds // unit_s
            return f"{count} {name}{'s' * (count != 1)}"
    return f"{seconds} seconds"
