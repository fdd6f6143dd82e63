"""Who is let into a run by invitation: whom the founder's word reaches, and nobody took back."""

from collections import Counter
from collections.abc import Iterable, Iterator
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
"""Beyond so many guests nobody is remembered by the word of others."""
OTHERS_LIMIT = 256
"""Of so many guests it is remembered by what else they have come."""
HANDED_ON_LIMIT = 256
HANDED_ON_BYTES = 256 << 10
REVOCATIONS_LIMIT = 1024
UNKNOWN_LIMIT = 64
"""Revocations of keys that may have nothing to take back, as far as is known: by what they come may
be heard later."""


_UNKNOWN = ""


class SavedGuests(msgspec.Struct, frozen=True):
    """What outlives the daemon: who came in before its line expired may come back."""

    guests: dict[str, tuple[Signed, ...]] = {}
    revocations: tuple[Signed, ...] = ()
    others: dict[str, tuple[Signed, ...]] = {}
    """By what else some of them have come."""


class _GuestWay(NamedTuple):
    """By which a peer has come: what it shows, and what that says."""

    shown: tuple[Signed, ...]
    chain: Chain


class GuestList:
    """Of one run, as one member knows it. Times are Unix seconds, and arguments."""

    def __init__(self, founder: str, run_digest: str, verify: Verify) -> None:
        self.founder = founder
        self.members = frozenset[str]()
        """Of the views of now: by what they have come is not forgotten, or a guest that lets in
        thousands of keys could be in for good, whatever is taken back."""
        self._run_digest = run_digest
        self._verify = verify
        self._ways: dict[str, _GuestWay] = {}
        self._others: dict[str, _GuestWay] = {}
        """By what else a peer has come: what it came by first may be heard of here before it is
        heard that this was taken back. Whom one of the two lets in is in."""
        self._unsigned: dict[str, _GuestWay] = {}
        """Of an earlier version's home: it says that they have come before, and lets nobody in."""
        self._revocations: dict[tuple[str, str], tuple[Revocation, Signed]] = {}
        self._speakers: dict[str, str] | None = None
        """By `_lines_by_speaker`; None: chains have changed since."""
        self._counts: Counter[str] | None = None
        """Revocations by line; None: something has changed since."""

    def introduce(
        self, peer_id: str, shown: tuple[Signed, ...], now_s: int, came_before: bool = False
    ) -> None:
        """A peer shows by what it comes. `came_before`: it is or was in a view, so others have let
        it in while its line held; of who is refused now that says nothing of a line that is closed.
        Raises `PeerFault` with the reason in words."""
        if peer_id == self.founder:
            return
        chain = open_shown(shown, self.founder, self._run_digest, peer_id, self._verify)
        ways = (*self._ways_of(peer_id), self._unsigned.get(peer_id))
        before = [way.chain.holders for way in ways if way is not None]
        is_by_this = chain.holders in before
        is_guest = is_by_this or (came_before and self.refusal(peer_id) is None)
        if (reason := self._taken_back(chain.holders, is_guest)) is not None:
            raise PeerFault(f"{NOT_INVITED}: {reason}", peer_id)
        if not (is_by_this or came_before) and now_s > chain.expires_s + SKEW_S:
            late_s = now_s - chain.expires_s
            raise PeerFault(
                f"{NOT_INVITED}: the invitation expired {_about(late_s)} ago, by this clock",
                peer_id,
            )
        self._remember(peer_id, _GuestWay(shown, chain))

    def told_of(self, shown: tuple[Signed, ...]) -> bool:
        """A member says by what another has come, perhaps long ago. Whether this is news; what was
        taken back since is none, nor is a line that is closed. Raises `PeerFault`. One who was
        let in anew may be told of by what it came by before as well, before or after that."""
        holders = holders_of(shown)
        peer_id, is_in = holders[-1], self.admits(holders[-1])
        has_room = peer_id in self._ways or len(self._ways) < TOLD_OF_LIMIT
        if peer_id == self.founder or not has_room:
            return False
        if is_in and not self._is_of_use(peer_id, holders):  # signatures cost more
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
        """By what guests have come, for whoever is new: first those who have taken something back,
        without whose own chains their word is nobody's, then the last ones that came."""
        givers = {giver for giver, _ in self._revocations}
        newest = sorted(reversed(self._ways), key=lambda peer_id: peer_id not in givers)
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
        """It is the one that counts first; what it came by before may count as well."""
        before, self._ways[peer_id] = self._ways_of(peer_id), way
        for known in (self._others, self._unsigned):
            known.pop(peer_id, None)
        for each in before:
            if self._is_of_use(peer_id, each.chain.holders):
                self._remember_other(peer_id, each)
        self._speakers = self._counts = None
        if len(self._ways) > GUESTS_LIMIT:
            oldest = self._oldest(self._ways)
            del self._ways[oldest]
            self._others.pop(oldest, None)

    def _remember_other(self, peer_id: str, way: _GuestWay) -> None:
        self._others[peer_id] = way
        self._speakers = self._counts = None
        if len(self._others) > OTHERS_LIMIT:
            del self._others[self._oldest(self._others)]

    def _is_of_use(self, peer_id: str, holders: tuple[str, ...]) -> bool:
        """Whether these are better than those of the other way that is known, if any. Best is one
        that hangs on nobody on whom the first does, then one that hangs on few: who invites others
        takes back what it gave."""
        first, held = self._ways[peer_id].chain.holders, self._others.get(peer_id)

        def how_bad(holders: tuple[str, ...]) -> tuple[bool, int]:
            return not set(holders[1:-1:2]).isdisjoint(first[1:-1:2]), len(holders)

        if holders == first or self._taken_back(holders, is_guest=True) is not None:
            return False
        is_held = held is not None and self._taken_back(held.chain.holders, is_guest=True) is None
        return held is None or not is_held or how_bad(holders) < how_bad(held.chain.holders)

    def _oldest(self, known: Iterable[str]) -> str:
        """Whoever is no member goes first."""
        in_order = list(known)
        return next((it for it in in_order if it not in self.members), in_order[0])

    def _ways_of(self, peer_id: str) -> list[_GuestWay]:
        found = (self._ways.get(peer_id), self._others.get(peer_id))
        return [way for way in found if way is not None]

    def admits(self, peer_id: str) -> bool:
        """Whether it has been let in, and that holds."""
        if peer_id == self.founder:
            return True
        return peer_id in self._ways and self.refusal(peer_id) is None

    def refusal(self, peer_id: str) -> str | None:
        """Why a peer is out that may have been in; None if nothing is known against it."""
        if chains := self.chains_of(peer_id):
            reasons = [self._taken_back(chain.holders, is_guest=True) for chain in chains]
            return None if None in reasons else reasons[0]
        return self._word_against(peer_id, {self.founder}, is_guest=True)

    def revoke(self, signed: Signed) -> bool:
        """Whether this is news, and is kept. Raises `PeerFault` for what nobody relays in good
        faith."""
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
        """Whether one more of it would stay: asked before a signature is looked at, which costs
        more. `_make_room` has the last word."""
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
        """Room is shared between the founder's lines, by which those that speak have come: the
        last word of whoever has taken most goes first, the founder's last of all."""
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
        """The founder's line to each peer that may take something back: it has invited, or may. A
        line's own key takes nothing back: all that were given the line have it."""
        if self._speakers is None:
            found = {self.founder: self.founder}
            for chain in self._all_chains():
                last = len(chain.holders) - (0 if chain.may_invite else 1)
                for peer_id in chain.holders[1:last:2]:
                    found.setdefault(peer_id, chain.holders[0])
            self._speakers = found
        return self._speakers

    def chain_of(self, peer_id: str) -> Chain | None:
        """What it has shown last, or others have told of it first."""
        way = self._ways.get(peer_id)
        return None if way is None else way.chain

    def chains_of(self, peer_id: str) -> tuple[Chain, ...]:
        return tuple(way.chain for way in self._ways_of(peer_id))

    def _all_chains(self) -> Iterator[Chain]:
        for way in (*self._ways.values(), *self._others.values()):
            yield way.chain

    def may_revoke(self, giver: str, holder: str) -> bool:
        """By what is known here: the founder everybody, others those that they have invited."""
        above = (
            c.holders[1 : c.holders.index(holder) : 2]
            for c in self._all_chains()
            if holder in c.holders
        )
        return giver == self.founder or any(giver in holders for holders in above)

    @property
    def revocations(self) -> tuple[Signed, ...]:
        """In the order in which they came."""
        return tuple(signed for _, signed in self._revocations.values())

    def saved(self) -> SavedGuests:
        shown, others = (
            {peer_id: way.shown for peer_id, way in known.items()}
            for known in (self._ways, self._others)
        )
        earlier = {peer_id: way.shown for peer_id, way in self._unsigned.items()}
        return SavedGuests(earlier | shown, self.revocations, others)

    def restore(self, saved: SavedGuests) -> None:
        """What this home wrote down; what does not hold any more is left out."""
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
        """Why nobody new comes in below it, though who has it may stay."""
        return self._taken_back(chain.holders, is_guest=False)

    def _taken_back(self, holders: tuple[str, ...], is_guest: bool) -> str | None:
        """Whichever peer stands above a holder in its chain may take back what it was given."""
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


def _about(seconds: int) -> str:
    for unit_s, name in ((86_400, "day"), (3_600, "hour"), (60, "minute")):
        if seconds >= unit_s:
            count = seconds // unit_s
            return f"{count} {name}{'s' * (count != 1)}"
    return f"{seconds} seconds"
