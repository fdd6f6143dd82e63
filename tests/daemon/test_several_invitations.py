"""A peer that came by more than one invitation, or by one that it did not need."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.invited.guest_list import GuestList
from p2p_dtfm.core.protocol.invited.line import InvitationLine
from p2p_dtfm.core.protocol.run_spec import AdmissionSpec
from p2p_dtfm.daemon.peers.doctor import check_invitation
from p2p_dtfm.daemon.peers.guests.guest_book import GuestBook
from p2p_dtfm.daemon.peers.guests.guest_book import book_of as opened
from p2p_dtfm.daemon.peers.guests.own_invitation import OwnInvitation
from p2p_dtfm.net.contacts.identity import Identity, verify
from p2p_dtfm.ports import now
from tests.core.builders import run_spec
from tests.daemon.test_guest_book import (
    ALICE,
    BOB,
    CAROL,
    DAY_S,
    FOUNDER,
    RUN,
    chain_by,
    founders_line,
    watch_of,
)

ADMISSION = AdmissionSpec(mode="invited", founder=FOUNDER.peer_id, key="00" * 32)
SPEC = run_spec(admission=ADMISSION)


def home_of(folder: Path, who: Identity, *lines: InvitationLine) -> GuestBook:
    """The guest book of a home that came by these lines, one after another, as after a start."""
    folder.mkdir(exist_ok=True)
    own = OwnInvitation(folder, RUN, who)
    for line in lines:
        own.come_by(line)
        opened(own, SPEC)
    return opened(own, SPEC)


def line_of(book: GuestBook, may_invite: bool = False) -> InvitationLine:
    return book.invite(int(now.wall_s()) + DAY_S, may_invite, ("/ip4/127.0.0.1/tcp/1",))


def test_a_founder_that_came_back_by_a_friends_line_invites_as_before(tmp_path: Path) -> None:
    """Its home was lost, and its key was not. Nobody came in by what it gave from then on: "the
    founder may not invite others"."""
    trusted = founders_line(tmp_path / "founder", may_invite=True)
    of_alice = line_of(home_of(tmp_path / "alice", ALICE, trusted))
    founder = home_of(tmp_path / "new", FOUNDER, of_alice)
    member = GuestList(FOUNDER.peer_id, RUN, verify)
    member.introduce(BOB.peer_id, chain_by(line_of(founder), BOB), int(now.wall_s()))
    assert member.admits(BOB.peer_id)


def test_who_pastes_a_line_of_its_own_keeps_to_what_it_came_by(tmp_path: Path) -> None:
    """It could invite nobody any more. When it took that line back it was out itself."""
    trusted = founders_line(tmp_path / "founder", may_invite=True)
    book = home_of(tmp_path / "alice", ALICE, trusted)
    before, line = book._own.kept.chain, line_of(book)
    book = home_of(tmp_path / "alice", ALICE, line)
    assert book._own.kept.chain == before
    book.revoke(line.holder, line)
    assert line_of(home_of(tmp_path / "alice", ALICE, line))


def test_who_stays_by_its_other_invitation_shows_that_one(tmp_path: Path) -> None:
    """`revoke` said that it stays. It was refused wherever it had to show its invitation anew, and
    its own daemon did not start any more."""
    folder = tmp_path / "founder"
    lines = [founders_line(folder, may_invite=True) for _ in range(2)]
    alice, carol = (
        home_of(tmp_path / who.peer_id[-6:], who, line)
        for who, line in zip((ALICE, CAROL), lines, strict=True)
    )
    by_alice, by_carol = line_of(alice), line_of(carol)
    bob = home_of(tmp_path / "bob", BOB, by_alice, by_carol)
    watch, _ = watch_of(
        bob, BOB, SimpleNamespace(view=None, next_view=None, joiners=(), hold_up=lambda *_: None)
    )
    for line in (by_alice, by_carol):
        carol.introduced(BOB.peer_id, chain_by(line, BOB))
    carol.introduced(ALICE.peer_id, chain_by(lines[0], ALICE))
    carol.revoke(BOB.peer_id)
    assert carol.known.admits(BOB.peer_id)
    carol.introduced(BOB.peer_id, chain_by(by_carol, BOB))  # it has not heard of that yet
    assert carol.known.admits(BOB.peer_id)

    bob.revoked(carol.known.revocations)
    watch.look()
    assert watch._messenger.introduction is not None
    newcomer = GuestList(FOUNDER.peer_id, RUN, verify)
    for word in carol.known.revocations:
        newcomer.revoke(word)
    newcomer.introduce(BOB.peer_id, watch._messenger.introduction.chain, int(now.wall_s()))
    assert newcomer.admits(BOB.peer_id)
    bob.save()
    again = home_of(tmp_path / "bob", BOB)
    assert again.known.admits(BOB.peer_id)
    assert again._own.kept.chain == chain_by(by_alice, BOB)
    own = OwnInvitation(tmp_path / "bob", RUN, BOB)
    own.come_by(by_carol)  # as a service's file has it
    assert own.kept.chain == chain_by(by_alice, BOB)
    found = check_invitation(tmp_path / "elsewhere", by_carol, BOB)
    assert found.found.endswith("and in time")

    alice.introduced(BOB.peer_id, chain_by(by_alice, BOB))
    alice.revoke(BOB.peer_id)
    with pytest.raises(PeerFault, match="was revoked"):
        alice.introduced(BOB.peer_id, chain_by(by_alice, BOB))


def test_who_is_in_by_one_invitation_is_not_refused_for_another_that_has_ended(
    tmp_path: Path,
) -> None:
    """A member that had only heard of the first one refused the peer for good."""
    folder, now_s = tmp_path / "founder", int(now.wall_s())
    first, second = founders_line(folder), founders_line(folder)
    member = GuestList(FOUNDER.peer_id, RUN, verify)
    member.introduce(BOB.peer_id, chain_by(first, BOB), now_s)
    member.introduce(BOB.peer_id, chain_by(second, BOB), now_s + 9 * DAY_S)
    assert member.admits(BOB.peer_id)
    assert member.shown_by(BOB.peer_id) == chain_by(first, BOB), "the other one is none"
    with pytest.raises(PeerFault, match="expired 2 days ago"):
        member.introduce(CAROL.peer_id, chain_by(first, CAROL), now_s + 9 * DAY_S)
