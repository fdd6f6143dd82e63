"""What a sender is to a daemon at the moment, and what the daemon's gate does about that."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.gate.gate_table import FIRST_WORDS, TABLE, Role
from p2p_dtfm.core.messages.agreement_messages import Gather, KnownView
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.invited.chains import (
    ChainLink,
    Revocation,
    bound_to,
    run_mark,
    sign_link,
    sign_revocation,
)
from p2p_dtfm.core.protocol.invited.guest_list import GuestList
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.wire import FollowLayers, Hello, Introduction, Knock
from p2p_dtfm.net.contacts.identity import identity_of_seed, verify
from p2p_dtfm.net.door import BUSY

VIEW = ViewId(2, "ab")


def _agreement(**facts: Any) -> Any:
    nothing = {"view": None, "next_view": None, "awaited": (), "agreed_contributors": ()}
    nothing["history"] = ()
    return SimpleNamespace(**{**nothing, **facts})


def _view(*members: str) -> Any:
    return SimpleNamespace(member_ids=members)


def _gather(sender: str, *contributors: str) -> Gather:
    signed = tuple(Signed(peer, "contribution", b"", b"") for peer in contributors)
    return Gather(Member(sender, 1), 4, True, VIEW, 1, signed, (), "")


def _keeper(agreement: Any = None, vouched: tuple[str, ...] = (), is_open: bool = False):
    keeper = GateKeeper(vouched)
    if agreement is not None:
        keeper.attach(agreement, is_open)
    return keeper


def test_roles_follow_the_views_and_the_attempt() -> None:
    agreement = _agreement(view=_view("me", "a", "b"), next_view=_view("me", "a", "c"))
    keeper = _keeper(agreement, vouched=("friend",))
    for member in ("a", "b", "c"):
        assert keeper.role_of(member) is Role.MEMBER
        assert keeper.trusts(member) == (member != "c"), "c has taken nothing over yet"
    agreement.awaited, agreement.agreed_contributors = ("d", "e"), ("e",)
    assert keeper.role_of("d") is Role.CONTRIBUTOR and not keeper.trusts("d")
    assert keeper.role_of("e") is Role.MEMBER, "it may know the next view already"
    agreement.view, agreement.next_view = _view("me", "a", "c"), None
    assert keeper.role_of("b") is Role.FORMER and keeper.trusts("b")
    assert keeper.role_of("friend") is Role.STRANGER, "in a view its members are known"
    assert keeper.trusts("friend"), "its user has named it"
    assert keeper.role_of("nobody") is Role.STRANGER and not keeper.trusts("nobody")


def test_who_was_only_to_join_is_nobodys_fellow() -> None:
    view = _view("me", "a")
    agreement = _agreement(view=view, next_view=_view("me", "a", "key"))
    keeper = _keeper(agreement)
    assert keeper.role_of("key") is Role.MEMBER and not keeper.trusts("key")
    agreement.next_view, agreement.agreed_contributors = None, ("key",)
    assert not keeper.trusts("key"), "its address is its own word"
    agreement.agreed_contributors = ()
    assert keeper.role_of("key") is Role.STRANGER


def test_fellows_of_before_a_restart_are_no_strangers() -> None:
    known = KnownView(VIEW, (Member("me", 1), Member("b", 1)), "")
    keeper = _keeper(_agreement(history=(known,)))
    assert keeper.role_of("b") is Role.FORMER and keeper.trusts("b")
    keeper = _keeper(_agreement(history=(known,), view=_view("me", "b")))
    assert keeper.role_of("b") is Role.MEMBER and keeper.role_of("c") is Role.STRANGER


def test_before_there_is_a_run_and_outside_of_views_those_named_count() -> None:
    keeper = _keeper(vouched=("friend",))
    assert keeper.is_outside and keeper.role_of("friend") is Role.MEMBER
    assert keeper.role_of("nobody") is Role.STRANGER
    keeper.attach(_agreement(), is_open=False)
    assert keeper.is_outside and keeper.role_of("friend") is Role.MEMBER
    keeper.require_message("nobody", _gather("nobody"), 100)


def test_who_knocks_gets_the_manifest_and_neither_data_nor_weights() -> None:
    keeper = _keeper(_agreement(view=_view("me", "a")))
    keeper.require_message("new", Knock("ab" * 32), 40)
    with pytest.raises(PeerFault, match="manifest: not its place to say of a stranger"):
        keeper.require("new", "manifest")
    keeper.admissions.admit("new", 10**18)
    assert keeper.role_of("new") is Role.NEWCOMER
    keeper.require("new", "manifest")
    for kind in ("data", "weights"):
        with pytest.raises(PeerFault, match="not its place to say of a newcomer"):
            keeper.require("new", kind)
        keeper.require("a", kind)
        _keeper(_agreement(view=_view("me")), is_open=True).require("anybody", kind)


def test_an_attempt_is_opened_only_with_what_a_member_has_signed() -> None:
    keeper = _keeper(_agreement(view=_view("me", "a")))
    with pytest.raises(PeerFault, match="not its place"):
        keeper.require_message("new", _gather("new", "new"), 500)
    keeper.require_message("new", _gather("new", "new", "a"), 500)
    follow = FollowLayers(VIEW, 1, {}, False)
    with pytest.raises(PeerFault, match="not its place"):
        keeper.require_message("new", follow, 100)
    keeper.require_message("a", follow, 100)


def test_the_door_counts_what_it_refuses_and_asks_to_come_again() -> None:
    keeper = _keeper(_agreement(view=_view("me", "a")))
    assert "not its place" in str(keeper.enter("new", "lane forward", 0))
    for _ in range(5):
        keeper.require_message("new", Hello(1, ()), 100)
    with pytest.raises(PeerFault, match=BUSY):
        keeper.require_message("new", Hello(1, ()), 100)
    shown = {(each.sender, each.kind): each.count for each in keeper.refused_most()}
    assert shown == {("stranger", "lane forward"): 1, ("stranger", "Hello"): 1}
    leave = keeper.enter("a", "blob", 10)
    assert callable(leave)
    leave()


def test_a_run_by_invitation_answers_nobody_who_is_not_invited() -> None:
    founder, guest, key = (identity_of_seed(bytes([n]) * 32) for n in (1, 2, 3))
    run = "ab" * 32
    line = ChainLink(run_mark(run), key.peer_id, True, False, 2_000_000_000)
    signed = (sign_link(line, founder.peer_id, founder.sign),)
    keeper = _keeper(_agreement(view=_view("me", "a")), vouched=("friend",))
    keeper.guests = GuestList(founder.peer_id, run, verify)
    for kind in (*TABLE, "something new"):
        if kind not in FIRST_WORDS:
            with pytest.raises(PeerFault, match="not invited"):
                keeper.require("nobody", kind)
    for said in (Hello(2, ()), Knock(run)):
        with pytest.raises(PeerFault, match="this run is by invitation"):
            keeper.require_message("friend", said, 40)
    assert "not invited" in str(keeper.enter("nobody", "directory", 0))
    keeper.require_message("nobody", Introduction(()), 40)  # and what comes of it is refused
    shown = bound_to(signed, run, guest.peer_id, key.sign, guest.sign)
    keeper.guests.introduce(guest.peer_id, shown, 0)
    assert keeper.role_of(guest.peer_id) is Role.NEWCOMER
    keeper.require_message(guest.peer_id, Hello(2, ()), 40)
    keeper.require(guest.peer_id, "manifest")
    word = Revocation(run_mark(run), guest.peer_id, False, 0)
    keeper.guests.revoke(sign_revocation(word, founder.peer_id, founder.sign))
    assert keeper.role_of(guest.peer_id) is Role.STRANGER and not keeper.trusts(guest.peer_id)
    with pytest.raises(PeerFault, match="was revoked by the founder"):
        keeper.require_message(guest.peer_id, Hello(2, ()), 40)
    assert keeper.role_of(founder.peer_id) is Role.NEWCOMER, "it needs no invitation"
    # who is refused before its words are read is told the same
    with pytest.raises(PeerFault, match="was revoked by the founder"):
        keeper.require_readable(guest.peer_id, "Hello", 40)
    with pytest.raises(PeerFault, match="not invited: this run is by invitation"):
        keeper.require_readable("nobody", "Hello", 40)


def test_who_is_in_the_view_came_before_though_what_is_known_was_taken_back() -> None:
    """The invitation that let this member in may be over by now; it was a stranger, and out for
    good."""
    founder, guest = (identity_of_seed(bytes([n]) * 32) for n in (1, 2))
    run = "ab" * 32
    keeper = _keeper(_agreement(view=_view("me", guest.peer_id)))
    keeper.guests = GuestList(founder.peer_id, run, verify)
    word = Revocation(run_mark(run), guest.peer_id, False, 0)
    keeper.guests.revoke(sign_revocation(word, founder.peer_id, founder.sign))
    assert not keeper.is_near(guest.peer_id) and keeper.came_before(guest.peer_id)
    assert not keeper.came_before("nobody")


def test_outside_of_views_a_run_by_invitation_hears_no_stranger_either() -> None:
    keeper = _keeper(_agreement())
    keeper.guests = GuestList("founder", "ab" * 32, verify)
    assert keeper.is_outside
    with pytest.raises(PeerFault, match="not invited"):
        keeper.require_message("nobody", _gather("nobody"), 100)


@pytest.mark.parametrize("agreement", [_agreement(), None])
def test_who_is_named_and_no_guest_gets_nothing_though_this_peer_is_in_no_view(
    agreement: Any,
) -> None:
    """A bootstrap node was taken for a member until the first view: it got transcript, data and
    weights."""
    founder, guest, key = (identity_of_seed(bytes([n]) * 32) for n in (1, 2, 3))
    run = "ab" * 32
    keeper = _keeper(agreement, vouched=("bootstrap node", guest.peer_id, founder.peer_id))
    keeper.guests = GuestList(founder.peer_id, run, verify)
    assert keeper.is_outside and keeper.role_of("bootstrap node") is Role.STRANGER
    for kind in (*TABLE, "something new"):
        if kind not in FIRST_WORDS:
            with pytest.raises(PeerFault, match="not invited"):
                keeper.require("bootstrap node", kind)
    assert keeper.trusts("bootstrap node"), "this peer calls it"
    assert keeper.role_of(founder.peer_id) is Role.MEMBER
    # a member that was named has come before, however old its line, and shows it
    assert keeper.role_of(guest.peer_id) is Role.STRANGER and keeper.came_before(guest.peer_id)
    line = ChainLink(run_mark(run), key.peer_id, True, False, 1_000_000_000)
    signed = (sign_link(line, founder.peer_id, founder.sign),)
    shown = bound_to(signed, run, guest.peer_id, key.sign, guest.sign)
    keeper.guests.introduce(guest.peer_id, shown, 2_000_000_000, came_before=True)
    assert keeper.role_of(guest.peer_id) is Role.MEMBER


@pytest.mark.parametrize("view", [_view("me", "a"), None])
def test_what_it_costs_to_read_newcomers_is_paid_by_all_of_them_together(view: Any) -> None:
    keeper, message = _keeper(_agreement(view=view)), _gather("new", "new", "a")
    row = TABLE["opening" if view is not None else "opening in no view"]
    keeper.require_message("new", message, 100)
    keeper.pays("new", row.sender.burst + 5 * row.sender.per_s)  # some is given back meanwhile
    with pytest.raises(PeerFault, match=BUSY):
        keeper.require_message("new", message, 100)
    keeper.require_message("new", Hello(2, ()), 100)
    keeper.require_message("other", _gather("other", "a"), 100)
    for number in range(row.together.burst // row.sender.burst):
        keeper.pays(f"n{number}", row.sender.burst)
    with pytest.raises(PeerFault, match=BUSY):
        keeper.require_message("other", _gather("other", "a"), 100)
    if view is not None:
        keeper.require_message("a", _gather("a"), 100)


def test_what_it_costs_to_read_a_member_has_a_bound_as_well() -> None:
    """Six thousand false signatures in a message took half a second to check each time. A member
    may send two thousand such messages a second."""
    keeper, rate = _keeper(_agreement(view=_view("me", "a", "b"))), TABLE["opening"].near
    keeper.pays("a", rate.burst)
    keeper.require_message("a", _gather("a"), 100)
    keeper.pays("a", rate.per_s)
    with pytest.raises(PeerFault, match=BUSY):
        keeper.require_message("a", _gather("a"), 100)
    keeper.require_message("b", _gather("b"), 100)


def test_in_no_view_what_is_read_is_paid_for_though_all_of_it_is_known() -> None:
    keeper, row = _keeper(_agreement()), TABLE["opening in no view"]
    let_in = 0
    with pytest.raises(PeerFault, match=BUSY):
        for _ in range(100):
            keeper.require_message("new", _gather("new"), 1 << 20)
            let_in += 1
    assert let_in == row.sender.burst // 1024 + 1
