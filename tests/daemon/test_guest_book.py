"""What members of a run by invitation tell one another of their guests, and what each believes."""

import contextvars
import errno
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import pytest

import p2p_dtfm.cli.commands.invite as cli_invite
from p2p_dtfm.core.gate.gate_table import TABLE
from p2p_dtfm.core.messages.agreement_messages import JoinRequest
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import (
    Revocation,
    bound_to,
    holder_of,
    links_of,
    run_mark,
    sign_revocation,
)
from p2p_dtfm.core.protocol.invited.guest_list import UNKNOWN_LIMIT, GuestList
from p2p_dtfm.core.protocol.invited.line import ADDRESSES_LIMIT, InvitationLine, read_line
from p2p_dtfm.core.protocol.records import sign_record
from p2p_dtfm.core.protocol.run_spec import AdmissionSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.node.dispatch import Dispatch
from p2p_dtfm.daemon.peers.checks.check import Grade
from p2p_dtfm.daemon.peers.doctor import check_invitation
from p2p_dtfm.daemon.peers.guests import guest_book
from p2p_dtfm.daemon.peers.guests.desk import addresses_to_tell, new_line, revoke
from p2p_dtfm.daemon.peers.guests.guest_book import TOLD_AT_ONCE, GuestBook
from p2p_dtfm.daemon.peers.guests.guest_watch import GuestWatch
from p2p_dtfm.daemon.peers.guests.own_invitation import OwnInvitation, invitation_of
from p2p_dtfm.daemon.peers.wire import Introduction, Revocations, pack
from p2p_dtfm.daemon.telemetry.names import Names
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed, verify
from p2p_dtfm.ports import disk, now
from p2p_dtfm.sim.faults.simulated_process import sign_for
from p2p_dtfm.testbed.virtual.disk import VirtualDisk
from tests.core.builders import record, run_spec
from tests.core.liars import say, swarm

RUN = digest_bytes(b"a run")
DAY_S = 86_400


def peer(number: int) -> Identity:
    return identity_of_seed(bytes([number]) * 32)


FOUNDER, ALICE, BOB, CAROL = (peer(number) for number in range(1, 5))


def book_of(folder: Path, who: Identity) -> GuestBook:
    """The guest book of a home that has just come to know its run."""
    folder.mkdir(exist_ok=True)
    own = OwnInvitation(folder, RUN, who)
    own.directory_key = bytes(32)
    return GuestBook(own, GuestList(FOUNDER.peer_id, RUN, verify))


def chain_by(line: InvitationLine, who: Identity) -> tuple[Signed, ...]:
    signers = identity_of_seed(line.seed).sign, who.sign
    return bound_to(line.chain, RUN, who.peer_id, *signers)


def founders_line(folder: Path, may_invite: bool = False) -> InvitationLine:
    ends_s = int(now.wall_s()) + 7 * DAY_S
    return book_of(folder, FOUNDER).invite(ends_s, may_invite, ("/ip4/127.0.0.1/tcp/1",))


class Receiver(Dispatch):
    """A dispatch that asks its own book alone."""

    def __init__(self, book: GuestBook, near: Sequence[str] = ()) -> None:
        self.blamed: list[str] = []
        self._network: Any = SimpleNamespace(guest_book=book)
        self._keeper: Any = SimpleNamespace(
            came_before=lambda sender: sender in near,
            blame=lambda sender, message: self.blamed.append(sender),
        )


def watch_of(book: GuestBook, me: Identity, views: SimpleNamespace) -> tuple[GuestWatch, list[Any]]:
    told: list[Any] = []
    messenger = SimpleNamespace(me=me.peer_id, tell=lambda *what: told.append(what))
    return GuestWatch(book, views, messenger, lambda actions: None), told  # type: ignore[arg-type]


def test_whose_key_as_a_founder_is_lost_is_told_to_put_it_back(tmp_path: Path) -> None:
    """The founder was told to ask the peer that had invited it."""
    admission = AdmissionSpec(mode="invited", founder=FOUNDER.peer_id, key="00" * 32)
    spec = run_spec(admission=admission)
    line, has_lost = founders_line(tmp_path / "founder"), ALICE
    with pytest.raises(UserError, match="this home founded run") as lost:
        invitation_of(tmp_path / "founder", has_lost, None, spec)
    assert "put identity.key back" in lost.value.fixes[0] and lost.value.exit_code == 5
    assert invitation_of(tmp_path / "founder", FOUNDER, None, spec) is not None
    assert invitation_of(tmp_path / "founder", has_lost, line, spec) is not None, "as a guest"
    guest = OwnInvitation(tmp_path / "founder", RUN, ALICE)
    guest.come_by(line)
    guest.write()
    assert invitation_of(tmp_path / "founder", BOB, None, spec) is not None, "told by its log"


def view(number: int, *members: Identity) -> SimpleNamespace:
    ids = tuple(sorted(each.peer_id for each in members))
    snapshot = SimpleNamespace(records=())
    return SimpleNamespace(id=ViewId(number, "ab"), member_ids=ids, snapshot=snapshot)


def test_a_newcomer_believes_old_guests_in_its_view_and_hears_of_those_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_book, "WRITE_EVERY_S", 0.0)
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
    again = OwnInvitation(tmp_path / "newer", RUN, CAROL)
    assert BOB.peer_id in again.kept.guests.guests, "and it knows so after a restart"


def test_all_hear_by_what_those_have_come_that_asked_one_member_alone(tmp_path: Path) -> None:
    line = founders_line(tmp_path / "founder")
    asked, other = book_of(tmp_path / "asked", ALICE), book_of(tmp_path / "other", CAROL)
    asked.introduced(BOB.peer_id, chain_by(line, BOB))
    asked.asked(BOB.peer_id)
    views = SimpleNamespace(view=view(1, ALICE, CAROL, FOUNDER), next_view=None)
    watch, told = watch_of(asked, ALICE, views)
    for agreed in (None, view(2, ALICE, BOB, CAROL, FOUNDER)):
        assert not told, "it is in no view yet"
        views.next_view = agreed
        watch._name_members()
        watch._hand_round()
        watch._hand_round()
    assert sorted(to for to, _ in told) == sorted(views.next_view.member_ids), "once"
    Receiver(other)._of_guests(ALICE.peer_id, told[0][1])
    other.revoked([word(FOUNDER, line.holder)])
    assert other.known.refusal(BOB.peer_id) == "the invitation was revoked by the founder"


def word(by: Identity, holder: str) -> Signed:
    revocation = Revocation(run_mark(RUN), holder, False, int(now.wall_s()))
    return sign_revocation(revocation, by.peer_id, by.sign)


def test_one_bad_revocation_costs_no_other_and_all_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_book, "WRITE_EVERY_S", 0.0)
    line = founders_line(tmp_path / "founder")
    book = book_of(tmp_path / "home", CAROL)
    for guest in (ALICE, BOB):
        book.introduced(guest.peer_id, chain_by(line, guest))
    forged = msgspec.structs.replace(word(FOUNDER, ALICE.peer_id), signature=bytes(64))
    words = (forged, word(FOUNDER, BOB.peer_id))
    receiver = Receiver(book)
    with pytest.raises(PeerFault, match="forged"):
        receiver._of_guests(ALICE.peer_id, Revocations(words))
    assert receiver.blamed == [ALICE.peer_id] and book.changes == 1
    assert book.known.admits(ALICE.peer_id) and not book.known.admits(BOB.peer_id)
    assert len(OwnInvitation(tmp_path / "home", RUN, CAROL).kept.guests.revocations) == 1
    unknown = tuple(word(peer(50), f"somebody{number}") for number in range(UNKNOWN_LIMIT + 3))
    receiver._of_guests(ALICE.peer_id, Revocations(unknown))  # it may know more of them than this
    assert receiver.blamed == [ALICE.peer_id]

    book.revoked([word(FOUNDER, "x" * 60 + str(number)) for number in range(TOLD_AT_ONCE)])
    views = SimpleNamespace(view=view(1, ALICE, CAROL), next_view=None)
    watch, told = watch_of(book, CAROL, views)
    assert watch._tell()
    messages = [message for to, message in told if to == ALICE.peer_id]
    assert len(messages) == 2
    assert tuple(it for each in messages for it in each.signed) == book.known.revocations
    assert max(len(pack(1, each)) for each in messages) < TABLE["Revocations"].size_bytes


def test_one_more_word_is_told_alone_and_costs_nobody_the_others_again(tmp_path: Path) -> None:
    """A member took back one guest each half second, and all members told one another the whole
    list."""
    book = book_of(tmp_path / "home", CAROL)
    book.revoked([word(FOUNDER, f"somebody{number}") for number in range(10)])
    views = SimpleNamespace(view=view(1, ALICE, CAROL), next_view=None)
    watch, told = watch_of(book, CAROL, views)
    assert watch._tell() and not watch._tell()
    told.clear()
    more = word(FOUNDER, BOB.peer_id)
    book.revoked([more])
    assert watch._tell()
    assert [message.signed for to, message in told if to == ALICE.peer_id] == [(more,)]
    views.view = view(2, ALICE, BOB, CAROL)
    told.clear()
    assert watch._tell()
    assert {to: message.signed for to, message in told}[BOB.peer_id] == book.known.revocations
    with pytest.raises(PeerFault, match="at once"):
        book.revoked([more] * (TOLD_AT_ONCE + 1))


def test_who_comes_in_again_and_again_by_other_lines_has_no_file_written_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time all guests were written, on the event loop. A member that may invite has lines
    without end, and may say so two thousand times a second."""
    monkeypatch.setattr(guest_book, "WRITE_EVERY_S", 10.0)
    book = book_of(tmp_path / "home", CAROL)
    lines = [founders_line(tmp_path / "founder") for _ in range(5)]
    written: list[object] = []
    write = book._own.write
    monkeypatch.setattr(book._own, "write", lambda: (written.append(None), write()))
    for line in lines:
        book.introduced(ALICE.peer_id, chain_by(line, ALICE))
    assert len(written) == 1
    book.write_heard()
    assert len(written) == 1
    monkeypatch.setattr(guest_book, "WRITE_EVERY_S", 0.0)
    book.write_heard()
    book.write_heard()
    assert len(written) == 2
    again = OwnInvitation(tmp_path / "home", RUN, CAROL)
    assert again.kept.guests.guests[ALICE.peer_id] == chain_by(lines[-1], ALICE)


def test_a_delegate_takes_back_a_line_that_nobody_has_used_and_hears_how_long_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    week = founders_line(tmp_path / "founder", may_invite=True)
    book = book_of(tmp_path / "alice", ALICE)
    book.introduced(ALICE.peer_id, chain_by(week, ALICE))
    own = book._own
    own.kept = msgspec.structs.replace(own.kept, chain=chain_by(week, ALICE))

    def ordered(home: Any, what: str, method: str) -> Any:
        assert method == "POST"
        parameters = dict(parse_qsl(what.partition("?")[2]))
        return new_line(book, RUN, parameters, ("/ip4/127.0.0.1/tcp/1",))

    monkeypatch.setattr(cli_invite, "call_daemon", ordered)
    cli_invite.invite(None, "30d", False, False, False)
    said = capsys.readouterr()
    assert "for 6 days 23 h" in said.err or "for 7 days 0 h" in said.err, said.err
    assert "shorter than asked" in said.err
    first = read_line(said.out.split()[-1])
    cli_invite.invite(None, "2h", False, False, False)
    said = capsys.readouterr()
    assert "for 2 h 0 min" in said.err and "shorter" not in said.err
    second = read_line(said.out.split()[-1])

    own = OwnInvitation(tmp_path / "alice", RUN, ALICE)  # as after a restart
    again = GuestBook(own, GuestList(FOUNDER.peer_id, RUN, verify))
    again.known.restore(own.kept.guests)
    revoke(again, first.holder, (), str)
    own.kept = msgspec.structs.replace(own.kept, lines={})  # too many since
    with pytest.raises(UserError, match="not this peer that invited"):
        revoke(again, second.holder, (), str)
    revoke(again, f"p2p-dtfm --invite {second.text()}", (), str)
    for line in (first, second):
        with pytest.raises(PeerFault, match="was revoked"):
            again.introduced(BOB.peer_id, chain_by(line, BOB))
    with pytest.raises(UserError, match="not this peer that invited"):
        revoke(again, founders_line(tmp_path / "other").text(), (), str)

    later_s = now.wall_s() + 8 * DAY_S
    monkeypatch.setattr(now, "wall_s", lambda: later_s)
    with pytest.raises(UserError, match="the line that this peer came by has ended"):
        again.invite(int(later_s) + DAY_S, False, ())


def test_who_came_by_a_line_that_is_closed_since_stays_and_invites_nobody(tmp_path: Path) -> None:
    """Such a guest printed lines by which nobody was let in."""
    line = founders_line(tmp_path / "founder", may_invite=True)
    founder, book = book_of(tmp_path / "founder", FOUNDER), book_of(tmp_path / "alice", ALICE)
    for each in (founder, book):
        for who in (ALICE, BOB):
            each.introduced(who.peer_id, chain_by(line, who))
    book._own.kept = msgspec.structs.replace(book._own.kept, chain=chain_by(line, ALICE))
    ends_s = int(now.wall_s()) + DAY_S
    assert book.invite(ends_s, False, ())
    founder.revoke(BOB.peer_id)
    book.revoked(founder.known.revocations)
    book.introduced(ALICE.peer_id, chain_by(line, ALICE))
    with pytest.raises(UserError, match="is closed"):
        book.invite(ends_s, False, ())


def test_who_waits_to_be_let_in_is_turned_away_once_its_invitation_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newcomer was let in with the next view, for which all wait, and then thrown out of it."""
    world = swarm(["a", "b"])
    agreement = world.peers["a"].agreement
    settings = agreement._state.settings
    settings.timing = replace(settings.timing, join_window_ns=1 << 60)
    for guest in (ALICE, BOB):
        name = guest.peer_id
        mine = msgspec.structs.replace(record(name), run_digest=settings.run_digest)
        say(world, name, "a", JoinRequest(sign_record(mine, sign_for(name))))
    book = book_of(tmp_path / "a", CAROL)
    line = founders_line(tmp_path / "founder")
    for guest in (ALICE, BOB):
        book.introduced(guest.peer_id, chain_by(line, guest))
    monkeypatch.setattr(now, "monotonic_ns", lambda: world.now_ns)
    messenger = SimpleNamespace(me="a", tell=lambda *what: None)
    watch = GuestWatch(book, agreement, messenger, lambda actions: None)  # type: ignore[arg-type]
    watch.look()
    assert [it.peer_id for it in agreement.joiners] == sorted([ALICE.peer_id, BOB.peer_id])
    word = Revocation(run_mark(RUN), BOB.peer_id, False, 0)
    book.revoked([sign_revocation(word, FOUNDER.peer_id, FOUNDER.sign)])
    watch.look()
    assert [it.peer_id for it in agreement.joiners] == [ALICE.peer_id]


def meet(book: GuestBook, **called: Identity) -> Names:
    """These peers are members by these names for a while, one after another."""
    names = Names()
    for name, who in called.items():
        records: Any = [SimpleNamespace(peer_id=who.peer_id, called=name.rstrip("_"))]
        book.met(records)
        names.learn(records)
    return names


def test_who_is_away_is_revoked_by_name(tmp_path: Path) -> None:
    """A stolen laptop sleeps, and is in no view: the answer was that no members have that name."""
    line, book = founders_line(tmp_path), book_of(tmp_path, FOUNDER)
    for guest in (ALICE, BOB):
        book.introduced(guest.peer_id, chain_by(line, guest))
    names = meet(book, founder=FOUNDER, ada=ALICE, bob=BOB)
    with pytest.raises(UserError, match="no members are called 'eve'") as unknown:
        revoke(book, "eve", (FOUNDER.peer_id,), names.of)
    assert "ada, bob" in unknown.value.fixes[0]
    assert revoke(book, "ada", (FOUNDER.peer_id,), names.of)["revoked"] == ALICE.peer_id
    assert not book.known.admits(ALICE.peer_id) and book.known.admits(BOB.peer_id)


def test_who_has_come_by_anothers_invitation_too_is_not_said_to_be_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`revoke` said that it was revoked, and it trained on."""
    folder = tmp_path / "founder"
    trusted, of_founder = founders_line(folder, may_invite=True), founders_line(folder)
    founder, book = book_of(folder, FOUNDER), book_of(tmp_path / "alice", ALICE)
    for each in (founder, book):
        each.introduced(ALICE.peer_id, chain_by(trusted, ALICE))
    book._own.kept = msgspec.structs.replace(book._own.kept, chain=chain_by(trusted, ALICE))
    of_alice = book.invite(int(now.wall_s()) + DAY_S, False, ("/ip4/127.0.0.1/tcp/1",))
    for each in (founder, book):
        for line in (of_alice, of_founder):
            each.introduced(BOB.peer_id, chain_by(line, BOB))
    for by, said in ((book, "it stays"), (founder, "is revoked")):
        ordered = lambda home, what, method, by=by: revoke(by, BOB.peer_id, (), str)  # noqa: E731
        monkeypatch.setattr(cli_invite, "call_daemon", ordered)
        cli_invite.revoke(BOB.peer_id, None)
        assert said in capsys.readouterr().out
        assert by.known.admits(BOB.peer_id) == (by is book)


@pytest.mark.parametrize("is_another_daemon", [False, True])
def test_of_several_that_are_called_alike_none_is_revoked_by_name(
    tmp_path: Path, is_another_daemon: bool
) -> None:
    """A guest that took the name of an absent guest was revoked in that one's place, above all
    after a restart of the daemon. Of two absent guests no id was told."""
    line, book = founders_line(tmp_path), book_of(tmp_path, FOUNDER)
    for guest in (ALICE, BOB, CAROL):
        book.introduced(guest.peer_id, chain_by(line, guest))
    names = meet(book, ada=ALICE, bob=BOB, bob_=CAROL)
    if is_another_daemon:
        book.save()
        known, book = book.known.saved(), book_of(tmp_path, FOUNDER)
        book.known.restore(known)
        names = meet(book, bob=CAROL)
    for here, told in (((CAROL.peer_id,), "(here)"), ((), "(away)")):
        with pytest.raises(UserError, match="2 members are called 'bob'") as both:
            revoke(book, "bob", here, names.of)
        assert f"{CAROL.peer_id} {told}" in both.value.fixes[0]
        assert f"{BOB.peer_id} (away)" in both.value.fixes[0]
    assert revoke(book, "ada", (), names.of)["revoked"] == ALICE.peer_id
    revoke(book, BOB.peer_id, (), names.of)
    assert revoke(book, "bob", (), names.of)["revoked"] == CAROL.peer_id, "one is left"


def test_by_a_name_nobody_is_revoked_while_somebody_away_may_have_it(tmp_path: Path) -> None:
    """That guest may have come and gone while this daemon was away, so its name is not known
    here."""
    line, book = founders_line(tmp_path), book_of(tmp_path, FOUNDER)
    for guest in (BOB, CAROL):
        book.introduced(guest.peer_id, chain_by(line, guest))
    names = meet(book, bob=CAROL)
    with pytest.raises(UserError, match="is not known whether others are called 'bob'") as unsure:
        revoke(book, "bob", (CAROL.peer_id,), names.of)
    assert f"{CAROL.peer_id} (here), {BOB.peer_id} (away)" in unsure.value.fixes[0]
    views = SimpleNamespace(view=view(1, BOB, CAROL), next_view=None, joiners=())
    views.view.snapshot.records = (SimpleNamespace(peer_id=BOB.peer_id, called="ada"),)
    watch_of(book, FOUNDER, views)[0].look()
    assert revoke(book, "bob", (CAROL.peer_id,), names.of)["revoked"] == CAROL.peer_id


def test_what_a_full_disk_did_not_take_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A guest that had been sent away came in again, once the members that knew had started
    again."""
    line = founders_line(tmp_path)
    book = book_of(tmp_path, FOUNDER)
    at_s, full = [now.monotonic_s()], [True]
    monkeypatch.setattr(guest_book.now, "monotonic_s", lambda: at_s[0])
    write_whole = disk.write_whole

    def write_if_there_is_room(*arguments: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_whole(*arguments)

    monkeypatch.setattr(disk, "write_whole", write_if_there_is_room)
    book.revoke(line.holder)
    for _ in range(3):
        at_s[0] += guest_book.WRITE_EVERY_S
        book.write_heard()
    assert caplog.text.count("cannot write down") == 1, "it is said once"
    full.clear()
    at_s[0] += guest_book.WRITE_EVERY_S
    book.write_heard()
    assert OwnInvitation(tmp_path, RUN, FOUNDER).kept.guests.revocations


def test_who_was_revoked_stays_out_after_a_power_cut(tmp_path: Path) -> None:
    """The file was forced to the disk, and its name was not. A line that was taken back before
    anybody had used it was good again, and only the founder had known."""
    line = founders_line(tmp_path)
    turns: Any = SimpleNamespace(now_ns=0, job_ns=0, in_job=True)
    machine_disk = VirtualDisk(turns)

    def take_back() -> None:
        disk.live_by(machine_disk)
        own = OwnInvitation(tmp_path, RUN, FOUNDER)
        known = GuestList(FOUNDER.peer_id, RUN, verify)
        GuestBook(own, known).revoke(line.holder)

    contextvars.copy_context().run(take_back)
    first: Any = SimpleNamespace(randint=lambda least, most: least)
    machine_disk.power_was_cut(first)
    assert OwnInvitation(tmp_path, RUN, FOUNDER).kept.guests.revocations


def test_who_is_another_peer_now_comes_in_by_the_same_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The daemon itself advises this where a home was copied. All members refused the new peer for
    good, as the line seemed to be used already."""
    line = founders_line(tmp_path / "founder")
    before = OwnInvitation(tmp_path, RUN, BOB)
    before.come_by(line)
    assert before.write()
    now_alice = OwnInvitation(tmp_path, RUN, ALICE)
    assert now_alice.introduction is None and "paste its line again" in caplog.text
    now_alice.come_by(line)
    assert holder_of(now_alice.kept.chain) == ALICE.peer_id
    assert now_alice.write()
    again = OwnInvitation(tmp_path, RUN, ALICE)
    again.come_by(line)
    assert again.kept == now_alice.kept


def test_an_expired_line_is_passed_over_where_a_later_one_let_this_home_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A service's file had the first line still, so each start ended as that one had expired."""
    book, now_s = book_of(tmp_path / "founder", FOUNDER), int(now.wall_s())
    first, second = (book.invite(now_s + days * DAY_S, False, ("/x",)) for days in (1, 7))
    home = tmp_path / "home"
    directory = home / "runs" / RUN[:16]
    directory.mkdir(parents=True)
    before = OwnInvitation(directory, RUN, BOB)
    before.come_by(first)
    before.come_by(second)
    assert before.write()
    monkeypatch.setattr(now, "wall_s", lambda: now_s + 2 * DAY_S)
    again = OwnInvitation(directory, RUN, BOB)
    again.come_by(first)
    assert again.kept == before.kept and "has expired" in caplog.text
    found = check_invitation(home, first, BOB)
    assert found.verdict is Grade.OK and "expired: this home keeps to the one" in found.found
    with pytest.raises(UserError, match="has expired"):
        OwnInvitation(tmp_path / "elsewhere", RUN, BOB).come_by(first)


def test_a_home_that_came_in_before_peers_signed_their_chains_signs_its_own(
    tmp_path: Path,
) -> None:
    line = founders_line(tmp_path / "founder")
    before = OwnInvitation(tmp_path, RUN, BOB)
    before.come_by(line)
    signed = before.kept.chain
    before.kept = msgspec.structs.replace(before.kept, chain=links_of(signed))
    assert before.write() and len(links_of(signed)) == len(signed) - 1
    again = OwnInvitation(tmp_path, RUN, BOB)
    assert again.kept.chain == signed
    again.come_by(line)
    assert again.kept.chain == signed


def test_what_cannot_be_read_is_not_set_aside_as_if_it_were_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that failed for a moment cost a home its invitation, and its list of guests that were
    taken back."""
    own = OwnInvitation(tmp_path, RUN, ALICE)
    own.come_by(founders_line(tmp_path / "founder"))
    assert own.write()
    opened = Path.open

    def fails(path: Path, *how: str) -> Any:
        if path.name == "guests.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return opened(path, *how)

    with monkeypatch.context() as failing, pytest.raises(UserError, match="says who was invited"):
        failing.setattr(Path, "open", fails)
        OwnInvitation(tmp_path, RUN, ALICE)
    assert OwnInvitation(tmp_path, RUN, ALICE).kept == own.kept
    (tmp_path / "guests.json").write_text("no json")
    assert not OwnInvitation(tmp_path, RUN, ALICE).kept.chain
    assert (tmp_path / "guests.damaged").read_text() == "no json"


def test_the_doctor_says_of_a_line_that_nobody_comes_in_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor tested the addresses of an expired line, and found nothing wrong."""
    line, home = founders_line(tmp_path / "founder"), tmp_path / "home"
    assert check_invitation(home, line, ALICE).verdict is Grade.OK
    assert not home.exists(), "it only looks"

    directory = home / "runs" / RUN[:16]
    directory.mkdir(parents=True)
    own = OwnInvitation(directory, RUN, ALICE)
    own.come_by(line)
    assert own.write()
    over_s = now.wall_s() + 8 * DAY_S
    monkeypatch.setattr(now, "wall_s", lambda: over_s)
    found = check_invitation(tmp_path / "another", line, ALICE)
    assert found.verdict is Grade.FAILED and "has expired" in found.found
    assert "p2p-dtfm invite" in found.fix
    assert check_invitation(home, line, ALICE).verdict is Grade.OK, "it came by it in time"


def test_the_doctor_looks_at_what_a_home_came_by_as_the_peer_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The doctor asked with an identity made for the occasion. A home in the run was told to paste
    its line again, and failed once the line had expired."""
    line, home = founders_line(tmp_path / "founder"), tmp_path / "home"
    directory = home / "runs" / RUN[:16]
    directory.mkdir(parents=True)
    (home / "identity.key").write_bytes(ALICE.to_bytes())
    own = OwnInvitation(directory, RUN, ALICE)
    own.come_by(line)
    assert own.write()
    over_s = now.wall_s() + 8 * DAY_S
    monkeypatch.setattr(now, "wall_s", lambda: over_s)
    assert check_invitation(home, line, BOB).verdict is Grade.OK
    assert not caplog.text
    (home / "identity.key").write_bytes(b"no key")
    found = check_invitation(home, line, BOB)
    assert found.verdict is Grade.FAILED and "is damaged" in found.found


@pytest.mark.parametrize(
    ("addresses", "is_told"),
    [
        (("/ip4/192.168.1.2/tcp/1", "/ip4/127.0.0.1/tcp/1"), True),
        (("/ip4/192.168.1.2/tcp/1", f"/ip4/10.0.0.1/tcp/1/p2p/{ALICE.peer_id}/p2p-circuit"), False),
        (("/ip4/192.168.1.2/tcp/1", "/ip4/5.9.0.1/tcp/1"), False),
        (("/dns4/swarm.example.org/tcp/1",), False),
    ],
)
def test_who_invites_is_told_that_nobody_elsewhere_can_call_what_the_line_names(
    addresses: tuple[str, ...],
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A founder who had forwarded a port gave out its machine's address at home."""
    full = tuple(f"{it}/p2p/{BOB.peer_id}" for it in addresses)
    ordered = lambda home, what, method: new_line(None, RUN, {}, full)  # noqa: E731
    monkeypatch.setattr(cli_invite, "call_daemon", ordered)
    cli_invite.invite(None, "7d", False, False, False)
    assert ("only machines of your own network" in capsys.readouterr().err) == is_told


RELAYED = f"/ip4/5.9.0.9/tcp/1/p2p/{ALICE.peer_id}/p2p-circuit"
AT_HOME, OF_A_CONTAINER = "/ip4/192.168.1.2/tcp/1", "/ip4/172.17.0.1/tcp/1"


@pytest.mark.parametrize("from_elsewhere", ["/ip4/5.9.0.1/tcp/1", RELAYED])
def test_a_line_names_a_way_from_elsewhere_and_one_of_this_network(from_elsewhere: str) -> None:
    """On a machine with a bridge for containers the line named that, and the machine at home.
    Nobody elsewhere could come by it, though the peer had told others how to call it."""
    own = (AT_HOME, OF_A_CONTAINER, from_elsewhere)
    for each in (own, own[::-1]):
        told = addresses_to_tell(each, {}, ())
        assert told[0] == from_elsewhere
        assert len(told) == 2 and told[1] in (AT_HOME, OF_A_CONTAINER)
    assert addresses_to_tell(own[:2], {}, ()) == own[:2]


def test_and_of_others_the_way_that_leads_there_from_elsewhere() -> None:
    others = {"one": ("/ip4/192.168.7.2/tcp/1", RELAYED), "two": ("/ip4/10.0.0.3/tcp/1",)}
    behind_a_firewall = (RELAYED, AT_HOME, "/ip6/2606:4700::1111/tcp/1")
    assert addresses_to_tell(behind_a_firewall, {}, ()) == (RELAYED, AT_HOME)
    told = addresses_to_tell((AT_HOME,), others, ())
    assert told == (AT_HOME, RELAYED, "/ip4/10.0.0.3/tcp/1")


def test_a_line_names_the_bootstrap_node_also_where_there_are_many_members() -> None:
    """Three other members took all places. A month later none of these was there, so nobody came
    in by the line, though the run went on and the node stood where it had been founded."""
    node, own = "/ip4/5.9.0.7/tcp/31331", (AT_HOME, "/ip4/5.9.0.1/tcp/1")
    others = {str(number): (f"/ip4/5.9.0.{number}/tcp/2",) for number in range(20, 30)}
    told = addresses_to_tell(own, others, (node, "/ip4/5.9.0.8/tcp/31331"))
    assert len(told) == ADDRESSES_LIMIT and node in told
    assert told[:2] == own[::-1], "its own come first"
    met = tuple(f"/ip4/5.9.0.{number}/tcp/2/p2p/{number}" for number in (20, 21))
    assert node in addresses_to_tell(own, others, (*met, node)), "a guest met members first"
    assert addresses_to_tell(own, {"one": (node,)}, (node,)) == (*own[::-1], node)
