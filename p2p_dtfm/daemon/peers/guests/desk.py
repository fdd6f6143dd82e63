"""Where a member's user invites others, and takes invitations back."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.invited.line import (
    ADDRESSES_LIMIT,
    PREFIX,
    open_line,
    read_line,
)
from p2p_dtfm.daemon.peers.guests.guest_book import GuestBook
from p2p_dtfm.net.contacts.addresses import is_from_elsewhere, is_loopback, is_relayed
from p2p_dtfm.net.contacts.identity import is_peer_id
from p2p_dtfm.ports import now

OWN_LIMIT = 2
AWAY_TOLD = 12
EXPIRES_LIMIT_S = 10 * 365 * 86_400


def addresses_to_tell(
    own: Sequence[str], others: Mapping[str, Sequence[str]], points: Sequence[str]
) -> tuple[str, ...]:
    """Two addresses of this peer, one of each of some others, and those where it met the run
    itself. Any one that lives is enough. The second of its own is for guests on this network.

    However many the others are, one place is for where the run was met and no member is: members
    come and go, and a bootstrap node stays."""
    best = sorted(own, key=_worth)
    near = [address for address in best if not is_from_elsewhere(address)]
    mine = list(dict.fromkeys((*best[:1], *near[:1], *best)))[:OWN_LIMIT]
    theirs = (min(where, key=_worth) for where in others.values() if where)
    of_no_member = [it for it in points if it.rpartition("/p2p/")[2] not in others]
    kept = tuple((of_no_member or points)[:1])
    members = [address for address in dict.fromkeys((*mine, *theirs)) if address not in kept]
    first = members[: ADDRESSES_LIMIT - len(kept)]
    return tuple(dict.fromkeys((*first, *kept, *points)))[:ADDRESSES_LIMIT]


def _worth(address: str) -> tuple[bool, bool]:
    """A sort key: addresses that can be called from elsewhere come first. Among those the order
    stays: a peer that has relays tells them first, because nobody gets through to its own."""
    is_here = is_loopback(address) and not is_relayed(address)
    return is_here, not is_from_elsewhere(address)


def new_line(
    book: GuestBook | None,
    run_digest: str,
    parameters: Mapping[str, str],
    addresses: Sequence[str],
) -> dict[str, Any]:
    """What `p2p-dtfm invite` prints. If the run asks for no invitation, the line only says where
    the run is. Raises `UserError`."""
    is_near = not any(map(is_from_elsewhere, addresses))
    if book is None:
        line = open_line(run_digest, addresses)
        return {
            "line": line.text(),
            "name": None,
            "expires_s": None,
            "lasts_s": None,
            "is_shorter": False,
            "may_invite": False,
            "is_near": is_near,
        }
    length = parameters.get("seconds", "")
    if not length.isdecimal() or not 60 <= int(length) <= EXPIRES_LIMIT_S:
        raise UserError(
            "an invitation lasts from a minute to ten years", "for example --expires 7d"
        )
    may_invite = parameters.get("may_invite") == "1"
    now_s = int(now.wall_s())
    line = book.invite(now_s + int(length), may_invite, addresses)
    lasts_s = (line.expires_s or now_s) - now_s
    return {
        "line": line.text(),
        "name": line.holder,
        "expires_s": line.expires_s,
        "lasts_s": lasts_s,
        "is_shorter": lasts_s < int(length),
        "may_invite": may_invite,
        "is_near": is_near,
    }


def revoke(
    book: GuestBook | None, who: str, members: Sequence[str], name_of: Callable[[str], str]
) -> dict[str, Any]:
    """Take back the invitation of a member, by its name or id, or of a line. `stays`: the member
    has come by somebody else's invitation, too, which holds. Raises `UserError`."""
    if book is None:
        raise UserError(
            "this run is not by invitation, so nobody can be revoked",
            'found one whose run spec says [admission] mode = "invited"',
        )
    who = who.strip()
    line = read_line(who) if PREFIX in who else None
    if line is not None and line.run_digest != book.run_digest:
        raise UserError("that invitation is to another run", "use the home that gave it")
    holder = line.holder if line is not None else _whom(who, members, book, name_of)
    book.revoke(holder, line)
    return {"revoked": holder, "stays": book.known.admits(holder)}


def _whom(who: str, members: Sequence[str], book: GuestBook, name_of: Callable[[str], str]) -> str:
    """The id of the peer called `who`: a member now, or one that came before and is away. Raises
    `UserError` if several are called so.

    It also raises if an away guest that never said its name here may be called so. Any guest can
    take the name of one that is away.
    """
    if is_peer_id(who):
        return who
    guests, here = book.guests, [it for it in members if book.known.refusal(it) is None]
    away = {it: name for it, name in guests.items() if it not in members}
    named = [it for it in (*here, *away) if who and who in (name_of(it), guests.get(it))]
    unheard = [it for it, name in away.items() if name is None and book.has_invited(it)]
    may_be = list(dict.fromkeys((*named, *unheard)))
    if named and len(may_be) == 1:
        return named[0]
    by_id = "or name its id, or the line that it came by"
    if not named:
        names = sorted(name or name_of(it) for it, name in away.items())
        told = ", ".join(names[:AWAY_TOLD]) or "none that is known"
        raise UserError(
            f"no members are called {who!r}",
            (f"p2p-dtfm peers lists those that are here; away: {told}", by_id),
        )
    fixes = (f"name the id of the one that is meant: {_ids_of(may_be, away)}", by_id)
    if len(named) == 1:
        raise UserError(f"it is not known whether others are called {who!r}, too", fixes)
    raise UserError(f"{len(named)} members are called {who!r}", fixes)


def _ids_of(peers: Sequence[str], away: Collection[str]) -> str:
    return ", ".join(f"{it} ({'away' if it in away else 'here'})" for it in peers[:AWAY_TOLD])
