"""Chains of signatures: who may let whom in, until when, and who may take an invitation back."""

import msgspec
import pytest

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import (
    ChainLink,
    Revocation,
    accepted,
    bound_to,
    links_of,
    run_mark,
    sign_link,
    sign_revocation,
)
from p2p_dtfm.core.protocol.invited.guest_list import (
    GUESTS_LIMIT,
    HANDED_ON_LIMIT,
    OTHERS_LIMIT,
    REVOCATIONS_LIMIT,
    TOLD_OF_LIMIT,
    UNKNOWN_LIMIT,
    GuestList,
    SavedGuests,
)
from p2p_dtfm.core.protocol.invited.line import InvitationLine, read_line, require_in_time
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed, verify

RUN, OTHER_RUN = "ab" * 32, "cd" * 32
DAY_S = 86_400
NOW_S = 1_800_000_000


def peer(number: int) -> Identity:
    return identity_of_seed(bytes([number]) * 32)


FOUNDER, ALICE, BOB, EVE, CAROL, DAVE = (peer(number) for number in range(1, 7))
LINE, SECOND, THIRD = peer(101), peer(102), peer(103)


def line_of(
    giver: Identity, key: Identity, above: tuple[Signed, ...] = (), **changes: object
) -> tuple[Signed, ...]:
    facts = {"may_invite": False, "expires_s": NOW_S + DAY_S, "run": RUN, **changes}
    run = run_mark(str(facts.pop("run")))
    link = ChainLink(run, key.peer_id, True, **facts)  # type: ignore[arg-type]
    return (*links_of(above), sign_link(link, giver.peer_id, giver.sign))


def shown(who: Identity, line: tuple[Signed, ...], key: Identity) -> tuple[Signed, ...]:
    return bound_to(line, RUN, who.peer_id, key.sign, who.sign)


def guests() -> GuestList:
    return GuestList(FOUNDER.peer_id, RUN, verify)


def refused(found: GuestList, who: Identity, chain: tuple[Signed, ...], now_s: int = NOW_S) -> str:
    with pytest.raises(PeerFault) as fault:
        found.introduce(who.peer_id, chain, now_s)
    assert not found.admits(who.peer_id)
    return fault.value.cause


def test_the_founders_line_lets_in_whoever_has_it_and_nobody_else() -> None:
    found, line = guests(), line_of(FOUNDER, LINE)
    assert found.admits(FOUNDER.peer_id) and not found.admits(ALICE.peer_id)
    chain = shown(ALICE, line, LINE)
    found.introduce(ALICE.peer_id, chain, NOW_S)
    assert found.admits(ALICE.peer_id)
    assert "somebody else's" in refused(found, EVE, chain), "what Alice shows is of no use to Eve"
    assert "not from who may give it" in refused(found, EVE, shown(EVE, line, EVE)[:1] * 2)
    assert "0 signatures" in refused(found, EVE, ())


def test_a_lines_own_key_is_no_guest() -> None:
    """A person with the line could be the very peer of its key. No answer came to whoever revoked
    that peer or the line. By a guest's line, the word fell on that guest."""
    found, line = guests(), line_of(FOUNDER, LINE, may_invite=True)
    trusted = shown(ALICE, line, LINE)
    found.introduce(ALICE.peer_id, trusted, NOW_S)
    for key, links in ((LINE, line), (SECOND, line_of(ALICE, SECOND, trusted))):
        itself = accepted(links, key.peer_id, key.sign)
        assert "names a line, and no peer" in refused(found, key, itself)
        with pytest.raises(PeerFault, match="names a line"):
            found.told_of(itself)


@pytest.mark.parametrize(
    "around", ["'{}'", '"{}"', "`{}`", "“{}”", "<{}>", "({}).", "p2p-dtfm --invite {}\u00a0"]
)
def test_a_line_is_read_out_of_the_text_around_it(around: str) -> None:
    """Quotes of a text are none of the shell. Messengers put spaces of no width into long words."""
    line = InvitationLine(
        bytes(32), bytes(32), bytes(32), line_of(FOUNDER, LINE), ("/ip4/1.1.1.1",)
    )
    text = line.text()
    broken = f"{text[:40]}\u200b{text[40:90]}\n{text[90:120]}\u00ad{text[120:]}\ufeff"
    for each in (text, broken):
        assert read_line(around.format(each)) == line
    for damaged in (text[:-5], f"{text[:90]}…{text[90:]}", text.upper(), f"{text}%0A"):
        with pytest.raises(UserError, match="no whole invitation"):
            read_line(around.format(damaged))


def test_forged_foreign_and_late_invitations_are_refused_with_the_reason() -> None:
    found = guests()
    by_eve = shown(EVE, line_of(EVE, LINE), LINE)
    assert "not from who may give it" in refused(found, EVE, by_eve)
    first, *rest = shown(EVE, line_of(FOUNDER, LINE), LINE)
    forged = Signed(first.peer_id, first.kind, first.payload, by_eve[0].signature)
    assert "forged" in refused(found, EVE, (forged, *rest))
    elsewhere = line_of(FOUNDER, LINE, run=OTHER_RUN)
    assert "another run" in refused(found, EVE, shown(EVE, elsewhere, LINE))
    chain = shown(ALICE, line_of(FOUNDER, LINE), LINE)
    late_s = NOW_S + DAY_S + 2 * 3600
    assert "expired 2 hours ago" in refused(found, ALICE, chain, late_s)
    found.introduce(ALICE.peer_id, chain, NOW_S + DAY_S + 200)  # clocks differ by minutes
    found.introduce(ALICE.peer_id, chain, late_s)  # a peer that came in before may come back


def test_who_came_in_before_meets_members_that_are_newer_than_its_line() -> None:
    older, newer, late_s = guests(), guests(), NOW_S + 9 * DAY_S
    chain = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    bobs = shown(BOB, line_of(ALICE, SECOND, chain), SECOND)
    for peer, by in ((ALICE, chain), (BOB, bobs)):
        older.introduce(peer.peer_id, by, NOW_S)
    assert "expired 8 days ago" in refused(newer, ALICE, chain, late_s)
    newer.introduce(ALICE.peer_id, chain, late_s, came_before=True)  # Alice is in the view
    assert newer.admits(ALICE.peer_id) and not newer.admits(BOB.peer_id)
    told = [newer.told_of(each) for each in older.handed_on()]  # Bob is away
    assert sorted(told) == [False, True] and newer.admits(BOB.peer_id)
    newer.introduce(BOB.peer_id, bobs, late_s)
    revoke(newer, ALICE, SECOND)
    assert not newer.admits(BOB.peer_id)
    with pytest.raises(PeerFault, match="was revoked"):
        newer.introduce(BOB.peer_id, bobs, NOW_S, came_before=True)


def test_who_is_said_to_have_come_before_must_show_it_and_comes_by_no_closed_line() -> None:
    found, line = guests(), line_of(FOUNDER, LINE)
    with pytest.raises(PeerFault, match="not from who may give it"):
        found.told_of(shown(EVE, line_of(EVE, SECOND), SECOND))
    for nonsense in ((), line * 9, (msgspec.structs.replace(line[0], payload=b"\xc1"),)):
        with pytest.raises(PeerFault):
            found.told_of(nonsense)
    revoke(found, FOUNDER, LINE, stays=True)
    assert not found.told_of(shown(EVE, line, LINE)) and not found.admits(EVE.peer_id)


def test_nobody_is_said_to_have_come_by_what_it_never_came_by() -> None:
    """A peer that may invite made chains to members and took them back. A newcomer that heard of it
    refused those members. It did so for good where the lines by which they had come were over."""
    trusted = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    made_up = links_of(shown(BOB, line_of(ALICE, SECOND, trusted), SECOND))
    bobs = shown(BOB, line_of(FOUNDER, THIRD), THIRD)
    by_alice = accepted(made_up, ALICE.peer_id, ALICE.sign)
    forged = msgspec.structs.replace(by_alice[-1], peer_id=BOB.peer_id)
    for chain in (made_up, (*made_up, bobs[-1]), by_alice, (*made_up, forged)):
        found, later_s = guests(), NOW_S + 9 * DAY_S
        found.introduce(ALICE.peer_id, trusted, NOW_S)
        with pytest.raises(PeerFault, match=r"has not signed|forged|not from who may give"):
            found.told_of(chain)
        revoke(found, ALICE, BOB)
        assert found.told_of(bobs) and found.admits(BOB.peer_id)
        found.introduce(BOB.peer_id, bobs, later_s)
        assert found.admits(BOB.peer_id)


def test_who_was_invited_anew_is_not_kept_out_by_what_it_came_by_before() -> None:
    """Whoever had invited the peer first could tell newcomers of that chain, and that it was taken
    back."""
    found, later_s = guests(), NOW_S + 9 * DAY_S
    trusted = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    before = shown(BOB, line_of(ALICE, SECOND, trusted), SECOND)
    anew = shown(BOB, line_of(FOUNDER, THIRD), THIRD)
    found.introduce(ALICE.peer_id, trusted, NOW_S)
    assert found.told_of(before)
    revoke(found, ALICE, BOB)
    assert not found.admits(BOB.peer_id) and not found.told_of(before)
    assert found.told_of(anew) and not found.told_of(before)
    found.introduce(BOB.peer_id, anew, later_s)
    assert found.admits(BOB.peer_id)


def test_who_was_invited_anew_is_in_whichever_is_heard_first() -> None:
    """A member that knew a peer by its old chain passed over the new one, and then heard that the
    old one was taken back. The peer was out there for good once its new line was over."""
    later_s = NOW_S + 9 * DAY_S
    trusted = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    before = shown(BOB, line_of(ALICE, SECOND, trusted), SECOND)
    again = shown(BOB, line_of(ALICE, peer(104), trusted), peer(104))
    anew = shown(BOB, line_of(FOUNDER, THIRD), THIRD)
    for order in ((before, anew), (anew, before), (before, again, anew), (again, anew, before)):
        found = guests()
        found.introduce(ALICE.peer_id, trusted, NOW_S)
        for chain in order:
            found.told_of(chain)
        assert anew in found.handed_on() and not found.told_of(anew)
        revoke(found, ALICE, BOB)
        kept = guests()  # what a member keeps, as after a restart
        kept.restore(found.saved())
        for each in (found, kept):
            assert each.admits(BOB.peer_id)
            each.introduce(BOB.peer_id, anew, later_s)
        revoke(found, FOUNDER, BOB)
        assert not found.admits(BOB.peer_id)


def test_who_was_revoked_does_not_return_by_a_line_that_is_closed() -> None:
    """The peer was in a view, so its new line may be over by now. Members believed that it had come
    by any line."""
    later_s = NOW_S + 9 * DAY_S
    trusted = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    before = shown(BOB, line_of(ALICE, SECOND, trusted), SECOND)
    leaked = shown(BOB, line_of(FOUNDER, THIRD), THIRD)
    closed = Revocation(run_mark(RUN), THIRD.peer_id, True, NOW_S)
    found = guests()
    found.revoke(sign_revocation(closed, FOUNDER.peer_id, FOUNDER.sign))
    found.introduce(ALICE.peer_id, trusted, NOW_S)
    found.introduce(BOB.peer_id, before, NOW_S)
    revoke(found, ALICE, BOB)
    with pytest.raises(PeerFault, match="revoked by the founder"):
        found.introduce(BOB.peer_id, leaked, later_s, came_before=True)
    assert not found.admits(BOB.peer_id)
    anew = shown(BOB, line_of(FOUNDER, peer(104)), peer(104))
    found.introduce(BOB.peer_id, anew, later_s, came_before=True)
    assert found.admits(BOB.peer_id)


def test_by_what_else_they_came_is_remembered_of_some_guests() -> None:
    found, one, two = guests(), line_of(FOUNDER, LINE), line_of(FOUNDER, SECOND)
    for number in range(OTHERS_LIMIT + 1):
        guest = key(10_000 + number)
        for line, by in ((one, LINE), (two, SECOND)):
            found.introduce(guest.peer_id, shown(guest, line, by), NOW_S)
    assert len(found.saved().others) == OTHERS_LIMIT
    revoke(found, FOUNDER, SECOND)
    assert [found.admits(key(10_000 + number).peer_id) for number in (0, 1)] == [False, True]


def test_what_would_not_be_kept_beside_what_is_known_is_not_looked_at() -> None:
    """A member may tell of hundreds of chains twice a second."""
    seen: list[str] = []

    def looked_at(peer_id: str, payload: bytes, signature: bytes) -> bool:
        seen.append(peer_id)
        return verify(peer_id, payload, signature)

    found = GuestList(FOUNDER.peer_id, RUN, looked_at)
    lines = [shown(BOB, line_of(FOUNDER, key(n)), key(n)) for n in range(5)]
    told = [found.told_of(chain) for chain in (*lines, *lines)]
    assert told == [True, True] + [False] * 8 and len(seen) == 2 * len(lines[0])


def test_guests_of_a_home_from_before_peers_signed_theirs_may_come_back() -> None:
    """The chains of such a home were dropped. A guest that was away counted as new, and its line
    was over."""
    line = line_of(FOUNDER, LINE)
    chain = shown(BOB, line, LINE)
    saved = SavedGuests({BOB.peer_id: links_of(chain), EVE.peer_id: line})
    for _ in range(2):
        found = guests()
        found.restore(saved)
        saved = found.saved()
    assert not found.admits(BOB.peer_id) and list(saved.guests) == [BOB.peer_id]
    found.introduce(BOB.peer_id, chain, NOW_S + 9 * DAY_S)
    assert found.admits(BOB.peer_id) and found.saved().guests == {BOB.peer_id: chain}
    assert "expired" in refused(found, EVE, shown(EVE, line, LINE), NOW_S + 9 * DAY_S)


def test_only_who_may_invite_does_and_not_for_longer_than_itself() -> None:
    found = guests()
    plain = shown(ALICE, line_of(FOUNDER, LINE), LINE)
    bobs = shown(BOB, line_of(ALICE, SECOND, plain), SECOND)
    assert "may not invite others" in refused(found, BOB, bobs)
    first, *_ = plain
    more = ChainLink(run_mark(RUN), ALICE.peer_id, False, True, NOW_S + DAY_S)
    links = (first, sign_link(more, LINE.peer_id, LINE.sign))
    greedy = accepted(links, ALICE.peer_id, ALICE.sign)
    assert "a right that it has not" in refused(found, ALICE, greedy)
    trusted = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    bobs = shown(BOB, line_of(ALICE, SECOND, trusted, expires_s=NOW_S + 9 * DAY_S), SECOND)
    assert "expired" in refused(guests(), BOB, bobs, NOW_S + 2 * DAY_S)
    found.introduce(BOB.peer_id, bobs, NOW_S)
    assert found.admits(BOB.peer_id)


def revoke(found: GuestList, by: Identity, whom: Identity, stays: bool = False) -> None:
    word = Revocation(run_mark(RUN), whom.peer_id, stays, NOW_S)
    found.revoke(sign_revocation(word, by.peer_id, by.sign))


def test_who_is_above_takes_back_and_who_is_beside_cannot() -> None:
    found = guests()
    trusted = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    bobs = shown(BOB, line_of(ALICE, SECOND, trusted), SECOND)
    found.introduce(ALICE.peer_id, trusted, NOW_S)
    found.introduce(BOB.peer_id, bobs, NOW_S)
    for nobody in (EVE, BOB):
        revoke(found, nobody, ALICE)
        assert found.admits(ALICE.peer_id) and not found.may_revoke(nobody.peer_id, ALICE.peer_id)
    revoke(found, ALICE, BOB)
    assert found.may_revoke(ALICE.peer_id, BOB.peer_id)
    assert found.admits(ALICE.peer_id) and not found.admits(BOB.peer_id)
    assert "was revoked" in (found.refusal(BOB.peer_id) or "")
    assert "was revoked" in refused(found, BOB, bobs)
    again = guests()  # what the home keeps, as after a restart
    again.restore(found.saved())
    assert again.admits(ALICE.peer_id) and not again.admits(BOB.peer_id)
    revoke(again, FOUNDER, LINE)
    assert not again.admits(ALICE.peer_id), "all that came by the line go"


def key(number: int) -> Identity:
    return identity_of_seed(number.to_bytes(32, "big"))


def test_nobody_from_outside_keeps_others_from_taking_back_or_undoes_it() -> None:
    found = guests()
    trusted = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    found.introduce(ALICE.peer_id, trusted, NOW_S)
    found.introduce(BOB.peer_id, shown(BOB, line_of(ALICE, SECOND, trusted), SECOND), NOW_S)
    revoke(found, ALICE, BOB)
    strangers = [key(1000 + number) for number in range(4)]
    for number in range(2 * UNKNOWN_LIMIT):
        revoke(found, strangers[number % 4], key(2000 + number))
    assert len(found.revocations) == 1 + UNKNOWN_LIMIT
    revoke(found, ALICE, CAROL)
    revoke(found, FOUNDER, EVE)
    assert not found.admits(BOB.peer_id)
    said = {signed.peer_id for signed in found.revocations}
    assert {ALICE.peer_id, FOUNDER.peer_id} <= said


def test_where_there_is_no_more_room_whoever_fills_it_loses_its_last_word() -> None:
    found = guests()
    trusted = shown(ALICE, line_of(FOUNDER, LINE, may_invite=True), LINE)
    greedy = shown(EVE, line_of(FOUNDER, SECOND, may_invite=True), SECOND)
    for peer, by in ((ALICE, trusted), (EVE, greedy)):
        found.introduce(peer.peer_id, by, NOW_S)
    revoke(found, FOUNDER, BOB)
    for number in range(REVOCATIONS_LIMIT):
        revoke(found, EVE, key(2000 + number))
    assert len(found.revocations) == REVOCATIONS_LIMIT
    revoke(found, ALICE, CAROL)
    revoke(found, FOUNDER, DAVE)
    of = [signed.peer_id for signed in found.revocations]
    assert len(of) == REVOCATIONS_LIMIT and of.count(FOUNDER.peer_id) == 2
    assert of.count(ALICE.peer_id) == 1 and not found.admits(BOB.peer_id)
    again = guests()
    again.restore(found.saved())
    assert again.revocations == found.revocations


def test_what_has_no_room_is_not_even_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of unknown keys came twice a second, and half a MB of them took a second."""
    seen: list[str] = []

    def looked_at(peer_id: str, payload: bytes, signature: bytes) -> bool:
        seen.append(peer_id)
        return verify(peer_id, payload, signature)

    found = GuestList(FOUNDER.peer_id, RUN, looked_at)
    for number in range(3 * UNKNOWN_LIMIT):
        revoke(found, key(1000 + number), BOB)
    assert len(seen) == UNKNOWN_LIMIT == len(found.revocations)
    revoke(found, FOUNDER, EVE)
    revoke(found, key(1000), BOB)  # these words are known already
    assert len(seen) == UNKNOWN_LIMIT + 1


def test_a_guest_with_thousands_of_keys_does_not_make_members_forget_by_what_they_came() -> None:
    """Such words made members forget. A line that was taken back then reached nobody who had come
    by it."""
    found, line = guests(), line_of(FOUNDER, LINE)
    found.introduce(ALICE.peer_id, shown(ALICE, line, LINE), NOW_S)
    found.members = frozenset({ALICE.peer_id})
    for number in range(GUESTS_LIMIT + 1):
        guest = key(10_000 + number)
        found.introduce(guest.peer_id, shown(guest, line, LINE), NOW_S)
    assert len(found.saved().guests) == GUESTS_LIMIT
    revoke(found, FOUNDER, LINE)
    assert found.refusal(ALICE.peer_id) is not None


def test_nor_does_it_keep_them_from_hearing_by_what_a_member_has_come() -> None:
    found, line = guests(), line_of(FOUNDER, LINE)
    for number in range(TOLD_OF_LIMIT):
        guest = key(10_000 + number)
        assert found.told_of(shown(guest, line, LINE))
    bobs = shown(BOB, line_of(FOUNDER, SECOND), SECOND)
    assert not found.told_of(bobs) and found.told_of(bobs, came_before=True)
    revoke(found, FOUNDER, SECOND)
    assert found.refusal(BOB.peer_id) is not None


def test_where_all_that_came_are_members_the_first_is_forgotten() -> None:
    found, line = guests(), line_of(FOUNDER, LINE)
    everybody = [key(10_000 + number).peer_id for number in range(GUESTS_LIMIT + 1)]
    found.members = frozenset(everybody)
    for number, peer_id in enumerate(everybody):
        found.introduce(peer_id, shown(key(10_000 + number), line, LINE), NOW_S)
    assert len(found.saved().guests) == GUESTS_LIMIT
    assert not found.admits(everybody[0]) and found.admits(everybody[-1])


def test_who_holds_a_line_takes_nothing_back_from_others_that_came_by_it() -> None:
    found, line = guests(), line_of(FOUNDER, LINE)
    found.introduce(ALICE.peer_id, shown(ALICE, line, LINE), NOW_S)
    revoke(found, LINE, ALICE)  # everybody who was given the line has its key
    assert found.admits(ALICE.peer_id) and not found.may_revoke(LINE.peer_id, ALICE.peer_id)


def test_a_closed_line_keeps_its_guests_and_lets_nobody_else_in() -> None:
    found, line = guests(), line_of(FOUNDER, LINE)
    found.introduce(ALICE.peer_id, shown(ALICE, line, LINE), NOW_S)
    revoke(found, FOUNDER, LINE, stays=True)
    assert found.admits(ALICE.peer_id)
    assert "revoked by the founder" in refused(found, BOB, shown(BOB, line, LINE))
    with pytest.raises(PeerFault, match="revokes the founder"):
        revoke(found, ALICE, FOUNDER)


def test_a_line_is_read_whole_or_not_at_all() -> None:
    chain = line_of(FOUNDER, LINE)
    line = InvitationLine(
        bytes.fromhex(RUN), b"k" * 32, b"s" * 32, chain, ("/ip4/1.2.3.4/tcp/5/p2p/" + "x" * 52,)
    )
    text = line.text()
    assert read_line(f" {text[:60]}\n{text[60:]} ") == line and len(text) < 700
    assert read_line(f"p2p-dtfm --invite {text}") == line, "as invite prints it"
    with pytest.raises(UserError, match="give an address as --initial-peers"):
        read_line(line.addresses[0])
    assert line.holder == LINE.peer_id
    for damaged in ("", text[:-9], text[6:], text[:80] + "A" + text[81:], "p2pi1-" + "A" * 9000):
        with pytest.raises(UserError, match="no whole invitation"):
            read_line(damaged)
    require_in_time(line, NOW_S + DAY_S + 200)
    with pytest.raises(UserError, match="has expired"):
        require_in_time(line, NOW_S + DAY_S + 400)


def test_nor_does_it_make_them_forget_who_is_away_and_came_by_another_line() -> None:
    """An absent guest was forgotten first. As its line had ended, it was refused when it came back.
    Whoever has a line makes thousands of keys, each of them a guest, in some minutes."""
    found, line, later_s = guests(), line_of(FOUNDER, LINE), NOW_S + 9 * DAY_S
    bobs = shown(BOB, line_of(FOUNDER, SECOND), SECOND)
    found.introduce(BOB.peer_id, bobs, NOW_S)
    for number in range(GUESTS_LIMIT + 1):
        guest = key(10_000 + number)
        found.introduce(guest.peer_id, shown(guest, line, LINE), NOW_S)
    assert len(found.saved().guests) == GUESTS_LIMIT
    found.introduce(BOB.peer_id, bobs, later_s)
    assert found.admits(BOB.peer_id)


def test_a_newcomer_hears_of_guests_by_each_line_however_many_came_by_one() -> None:
    found, line = guests(), line_of(FOUNDER, LINE)
    bobs = shown(BOB, line_of(FOUNDER, SECOND), SECOND)
    found.introduce(BOB.peer_id, bobs, NOW_S)
    for number in range(HANDED_ON_LIMIT):
        guest = key(10_000 + number)
        found.introduce(guest.peer_id, shown(guest, line, LINE), NOW_S)
    handed = found.handed_on()
    assert bobs in handed and len(handed) <= HANDED_ON_LIMIT
    assert handed[0] == shown(key(10_000 + HANDED_ON_LIMIT - 1), line, LINE), "the newest first"
