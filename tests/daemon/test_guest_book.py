"""What members of a run by invitation tell one another of their guests, and what each believes."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.invited.chains import bound_to
from p2p_dtfm.core.protocol.invited.guest_list import GuestList
from p2p_dtfm.core.protocol.invited.line import InvitationLine
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.node.dispatch import Dispatch
from p2p_dtfm.daemon.peers.guests.guest_book import GuestBook
from p2p_dtfm.daemon.peers.guests.guest_watch import GuestWatch
from p2p_dtfm.daemon.peers.wire import Introduction, Revocations
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed, verify
from p2p_dtfm.ports import now

RUN = digest_bytes(b"a run")
DAY_S = 86_400


def peer(number: int) -> Identity:
    return identity_of_seed(bytes([number]) * 32)


FOUNDER, ALICE, BOB, CAROL = (peer(number) for number in range(1, 5))


def book_of(folder: Path, who: Identity) -> GuestBook:
    """Of a home that has just come to know its run."""
    folder.mkdir(exist_ok=True)
    book = GuestBook(folder, RUN, who)
    book.guests = GuestList(FOUNDER.peer_id, RUN, verify)
    return book


def chain_by(line: InvitationLine, who: Identity) -> tuple[Signed, ...]:
    return bound_to(line.chain, RUN, who.peer_id, identity_of_seed(line.seed).sign)


def founders_line(folder: Path, days: int = 7) -> InvitationLine:
    ends_s = int(now.wall_s()) + days * DAY_S
    return book_of(folder, FOUNDER).invite(ends_s, False, ("/ip4/127.0.0.1/tcp/1",))


class Receiver(Dispatch):
    """That asks its own book alone."""

    def __init__(self, book: GuestBook, near: Sequence[str] = ()) -> None:
        self.blamed: list[str] = []
        self._network: Any = SimpleNamespace(guest_book=book)
        self._keeper: Any = SimpleNamespace(
            is_near=lambda sender: sender in near,
            blame=lambda sender, message: self.blamed.append(sender),
        )


def watch_of(book: GuestBook, me: Identity, views: SimpleNamespace) -> tuple[GuestWatch, list[Any]]:
    told: list[Any] = []
    messenger = SimpleNamespace(me=me.peer_id, tell=lambda *what: told.append(what))
    return GuestWatch(book, views, messenger, lambda actions: None), told  # type: ignore[arg-type]


def view(number: int, *members: Identity) -> SimpleNamespace:
    ids = tuple(sorted(each.peer_id for each in members))
    return SimpleNamespace(id=ViewId(number, "ab"), member_ids=ids)


def test_a_newcomer_believes_old_guests_in_its_view_and_hears_of_those_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = founders_line(tmp_path / "founder")
    older, newer = book_of(tmp_path / "older", ALICE), book_of(tmp_path / "newer", CAROL)
    for guest in (ALICE, BOB):
        older.introduced(guest.peer_id, chain_by(line, guest))
    later_s = now.wall_s() + 9 * DAY_S
    monkeypatch.setattr(now, "wall_s", lambda: later_s)
    shown = Introduction(chain_by(line, ALICE))
    with pytest.raises(PeerFault, match="expired 2 days ago"):
        Receiver(newer)._of_guests(ALICE.peer_id, shown)
    Receiver(newer, near=[ALICE.peer_id])._of_guests(ALICE.peer_id, shown)
    assert newer.known.admits(ALICE.peer_id)

    views = SimpleNamespace(view=view(1, ALICE, FOUNDER), next_view=None)
    watch, told = watch_of(older, ALICE, views)
    watch._hand_on()
    told.clear()
    views.view = view(2, ALICE, FOUNDER, CAROL)
    watch._hand_on()
    watch._hand_on()
    ((to, message),) = told
    assert to == CAROL.peer_id and isinstance(message, Revocations)
    assert not newer.known.admits(BOB.peer_id)
    Receiver(newer)._of_guests(ALICE.peer_id, message)
    Receiver(newer)._of_guests(BOB.peer_id, Introduction(chain_by(line, BOB)))
    assert newer.known.admits(BOB.peer_id)
    again = GuestBook(tmp_path / "newer", RUN, CAROL)
    assert BOB.peer_id in again._kept.guests.guests, "and it knows so after a restart"
