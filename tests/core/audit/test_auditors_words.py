"""What an auditor says of a work is signed and accounted for. An auditor that tells one thing to
some and another to others goes for it. Those that it told keep their place, though they alone have
found that a work is false."""

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import fault_of_account, findings
from p2p_dtfm.core.audit.claim_book import ClaimBook
from p2p_dtfm.core.audit.work import (
    SENT_OTHER,
    WORK_BYTES,
    changed_work,
    excused_by,
    heard_claim,
    require_signed_audit,
    signed_audit,
    signed_claim,
)
from p2p_dtfm.core.messages.audit_messages import (
    AUDITS_LIMIT,
    COULD_NOT,
    Audited,
    Claimed,
    HeardAudit,
    ShownClaims,
)
from p2p_dtfm.core.messages.prepared import Prepared, open_prepared, sign_prepared
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.audit.parts import NAMES, PLAN, VIEW, share_of, step_of, work_of_share

ALL = 1_000_000
STEP = 7
SEGMENTS = PLAN.segments()
SHARES = {name: share_of(name) for name in NAMES}
WORKS = {name: work_of_share(share, name) for name, share in SHARES.items()}
WRONG, CLAIMED = b"0" * WORK_BYTES, b"w" * WORK_BYTES
Words = dict[str, list[tuple[str, str, bytes]]]
"""By the peers that have heard the words: auditor, whose work, and what the work comes to."""


def audit(by: str, of: str, work: bytes) -> HeardAudit:
    said = signed_audit(Audited(VIEW, STEP, of, work), by, sign_for(by))
    return HeardAudit(NAMES.index(by), NAMES.index(of), work, said.signature)


def told(
    found: dict[str, dict[str, bytes]], words: Words, doubted: dict[str, str]
) -> dict[str, Prepared]:
    """Everybody's Prepared. `doubted`: by the peer that an auditor told of a doubt, whose work that
    doubt is about."""
    said = step_of(SHARES, found, told="")
    for name, prepared in said.items():
        mine = found.get(name, {})
        assert prepared.audit is not None
        account = msgspec.structs.replace(
            prepared.audit,
            disputed={it: mine.get(it, WORKS[it]) != WORKS[it] for it in doubted.get(name, "")},
            audits=tuple(audit(*word) for word in words.get(name, ())),
        )
        assert not fault_of_account(account, PLAN, SEGMENTS, name)
        said[name] = msgspec.structs.replace(prepared, audit=account)
    return said


def as_claimed(by: str, of: str) -> Words:
    """The auditor says to everybody that the work is what its maker claimed."""
    return {name: [(by, of, WORKS[of])] for name in NAMES}


@pytest.mark.parametrize("them", ["a", "ad"])
def test_who_found_that_it_is_so_keeps_its_place_and_who_whispered_it_goes(them: str) -> None:
    """b was drawn for its colluder c, whose work is false."""
    words = as_claimed("b", "c") | {name: [("b", "c", WRONG)] for name in them}
    truth = {name: {"c": b"t" * WORK_BYTES} for name in them}
    said = told(truth, words, dict.fromkeys(them, "c"))
    for missing in ("", "b", "c"):
        heard = {name: it for name, it in said.items() if name != missing}
        found = findings(heard, PLAN, SEGMENTS)
        assert set(found.liars) == found.convicted == {"b"}, missing
        assert not found.doubts and not found.even
        assert "one thing to some" in found.liars["b"]


def test_before_an_auditor_s_words_were_accounted_for_an_honest_one_went() -> None:
    """Words that nobody signed otherwise spare nobody. A peer that accuses behind the others' backs
    goes as before, whatever it shows of a colluder's words."""
    said = told({"a": {"c": WRONG}}, {}, {"a": "c"})
    assert set(findings(said, PLAN, SEGMENTS).liars) == {"a"}
    shown = told({"a": {"c": WRONG}, "b": {"c": WRONG}}, {"a": [("b", "c", WRONG)]}, {"a": "c"})
    assert set(findings(shown, PLAN, SEGMENTS).liars) == {"a", "b"}


def test_who_tells_one_alone_that_it_could_not_judge_goes_as_well() -> None:
    """The peer that was told audits in the auditor's place and finds the lie, and nobody waits for
    that peer's word."""
    words = as_claimed("b", "c")
    words["a"] = [("b", "c", COULD_NOT), ("a", "c", WRONG)]
    found = findings(told({"a": {"c": WRONG}}, words, {"a": "c"}), PLAN, SEGMENTS)
    assert set(found.liars) == found.convicted == {"b"} and not found.doubts


def test_a_colluder_s_whispers_save_nobody_whom_all_were_told_of() -> None:
    truth = {name: {"c": WRONG} for name in "abd"}
    words = {name: [("a", "c", WRONG), ("d", "c", WORKS["c"])] for name in NAMES}
    words["b"][1] = ("d", "c", COULD_NOT)
    found = findings(told(truth, words, dict.fromkeys("abd", "c")), PLAN, SEGMENTS)
    assert set(found.liars) == found.convicted == {"c", "d"}


def test_who_was_not_waited_for_as_another_one_whispered_has_accused_nobody_in_secret() -> None:
    """Once an auditor is known to have said two things, nobody is waited for. All others may have
    said their Prepared before a is through with its audit of d, whose work is false."""
    words: Words = {name: [("c", "b", WORKS["b"]), ("c", "b", WRONG)] for name in "bcd"}
    words["a"] = [("a", "d", WRONG), *words["b"]]
    said = told({"a": {"d": WRONG}}, words, {"a": "d"})
    found = findings(said, PLAN, SEGMENTS)
    assert set(found.liars) == found.convicted == {"c"} and not found.doubts and not found.even


def test_a_doubt_that_was_told_to_all_cannot_be_taken_back() -> None:
    """The doubt costs each member an audit, and it costs the liar its place."""
    words: Words = {name: [("b", "c", WRONG)] for name in NAMES}
    for taken_back in ({}, {"c": WORKS["c"]}):
        found = {name: {"c": WORKS["c"]} for name in "ad"} | {"b": taken_back}
        said = told(found, words, dict.fromkeys("abd", "c"))
        result = findings(said, PLAN, SEGMENTS)
        assert set(result.liars) == result.convicted == {"b"} and not result.doubts


@pytest.mark.parametrize("mark", [SENT_OTHER, changed_work(WORKS["c"]), excused_by("a")])
def test_what_marks_a_work_in_an_account_is_a_word_like_any_where_an_auditor_says_it(
    mark: bytes,
) -> None:
    """The mark was taken for what an account says in place of a work. All members computed the work
    again, and nobody was ever held to it."""
    words: Words = {name: [("b", "c", mark)] for name in NAMES}
    for own in ({"c": mark}, {"c": WORKS["c"]}, {}):
        found = {name: {"c": WORKS["c"]} for name in "ad"} | {"b": own}
        result = findings(told(found, words, dict.fromkeys("abd", "c")), PLAN, SEGMENTS)
        assert set(result.liars) == result.convicted == {"b"} and not result.doubts, own


def test_words_that_all_have_heard_alike_are_held_against_nobody() -> None:
    ring = dict(zip(NAMES, "bcda", strict=True))
    words: Words = {name: [(by, of, WORKS[of]) for by, of in ring.items()] for name in NAMES}
    words["d"] = words["d"][:1]
    found = {by: {of: WORKS[of]} for by, of in ring.items()}
    assert findings(told(found, words, {}), PLAN, SEGMENTS) == ({}, {}, set(), {})
    could_not: Words = {name: [("b", "c", COULD_NOT)] for name in NAMES}
    assert findings(told({}, could_not, {}), PLAN, SEGMENTS) == ({}, {}, set(), {})


def test_nobody_has_heard_what_an_auditor_has_not_signed() -> None:
    said = told({}, {}, {})["a"]
    assert said.audit is not None
    heard = {
        name: heard_claim(claim(name)) for name in NAMES
    }  # of this step, as whoever looks at the words must find
    true = audit("b", "c", WRONG)
    for audits, why in (
        ((true,), ""),
        ((true._replace(work=WORKS["c"]),), "has not signed"),
        ((true._replace(by=3),), "has not signed"),
        ((true._replace(of=0),), "has not signed"),
        ((true._replace(by=4),), "without a stage"),
        ((true._replace(of=-1),), "without a stage"),
        ((true._replace(signature=b"s" * 5000),), "has not signed"),
        ((true,) * (AUDITS_LIMIT + 1), "has heard 65 audits"),
    ):
        account = msgspec.structs.replace(said.audit, heard=heard, audits=audits)
        signed = sign_prepared(msgspec.structs.replace(said, audit=account), sign_for("a"))
        if not why:
            assert open_prepared(signed, verify).audit == account
            continue
        with pytest.raises(PeerFault, match=why) as fault:
            open_prepared(signed, verify)
        assert fault.value.peer_id == "a"


def test_an_account_s_audits_are_digests() -> None:
    said = told({}, {}, {})["a"]
    assert said.audit is not None
    account = msgspec.structs.replace(said.audit, audits=(audit("b", "c", b"short"),))
    assert "another length" in fault_of_account(account, PLAN, SEGMENTS, "a")


def test_an_audit_is_of_its_view_step_and_work() -> None:
    said = signed_audit(Audited(VIEW, STEP, "c", WRONG), "b", sign_for("b"))
    require_signed_audit(said, "b", verify)
    others = (
        Audited(VIEW, STEP, "c", WRONG),
        msgspec.structs.replace(said, step=8),
        msgspec.structs.replace(said, view=ViewId(4, VIEW.snapshot)),
        msgspec.structs.replace(said, peer_id="a"),
        msgspec.structs.replace(said, work=COULD_NOT),
    )
    for other in others:
        with pytest.raises(PeerFault, match="not signed"):
            require_signed_audit(other, "b", verify)
    with pytest.raises(PeerFault, match="not signed"):
        require_signed_audit(said, "a", verify)


def claim(name: str) -> Claimed:
    said = Claimed(VIEW, STEP, share_of(name), CLAIMED, b"o" * 32, b"c" * 32)
    return signed_claim(said, name, sign_for(name))


def book_of() -> ClaimBook:
    book = ClaimBook(VIEW, PLAN, ALL)
    book.step_begins(STEP)
    for name in NAMES:
        book.record(name, claim(name))
    return book


def says(book: ClaimBook, by: str, of: str, work: bytes) -> None:
    book.record(by, signed_audit(Audited(VIEW, STEP, of, work), by, sign_for(by)))


def shown(book: ClaimBook) -> ShownClaims:
    heard = {name: heard_claim(it) for name, it in book.claims.items()}
    return ShownClaims(VIEW, STEP, heard, book.heard_audits(b""))


def test_what_was_told_unlike_is_known_once_it_is_shown_and_nobody_is_waited_for() -> None:
    """Both of the auditor's words are then accounted for."""
    first, second = book_of(), book_of()
    by = first.drawn()["c"]
    says(first, by, "c", WRONG)
    says(second, by, "c", CLAIMED)
    assert first.silent(first.drawn()) and first.disputed() == ["c"]
    assert not second.contradicted() and second.disputed() == []
    second.show("a", shown(first), verify)
    assert second.contradicted() == {(by, "c")}
    assert second.silent(second.drawn()) == () and second.disputed() == ["c"]
    assert set(second.heard_audits(b"")) == {audit(by, "c", WRONG), audit(by, "c", CLAIMED)}
    first.show("b", shown(second), verify)
    assert first.contradicted() == {(by, "c")}, "each is told by the other"


def test_who_tells_one_two_things_is_known_to_that_one() -> None:
    book = book_of()
    by = book.drawn()["c"]
    for work in (CLAIMED, WRONG, b"x" * WORK_BYTES):
        says(book, by, "c", work)
    assert [it.work for it in book.heard_audits(b"")] == [CLAIMED, WRONG]


def test_who_was_told_nothing_hears_it_from_another_one() -> None:
    told_all, lacks_one = book_of(), book_of()
    for peer, by in told_all.drawn().items():
        says(told_all, by, peer, CLAIMED)
        if peer != "c":
            says(lacks_one, by, peer, CLAIMED)
    by = told_all.drawn()["c"]
    assert lacks_one.silent(lacks_one.drawn()) == (by,)
    audits = told_all.lacks_audits(shown(lacks_one), b"")
    assert audits == (audit(by, "c", CLAIMED),)
    assert not lacks_one.lacks_audits(shown(told_all), b"")
    lacks_one.show("a", ShownClaims(VIEW, STEP, {}, audits), verify)
    assert lacks_one.silent(lacks_one.drawn()) == () and not lacks_one.contradicted()


def test_who_was_not_told_a_claim_gets_it_from_another_one() -> None:
    told, lacks_one = book_of(), ClaimBook(VIEW, PLAN, ALL)
    lacks_one.step_begins(STEP)
    for name in "abd":
        lacks_one.record(name, claim(name))
    unsigned = msgspec.structs.replace(told.claims["c"], signature=b"")
    forged = msgspec.structs.replace(told.claims["c"], work=WRONG)
    for false in (unsigned, forged):
        with pytest.raises(PeerFault, match="not signed"):
            lacks_one.show("a", ShownClaims(VIEW, STEP, {}, whole={"c": false}), verify)
    assert lacks_one.not_claimed() == ("c",)
    shown_whole = ShownClaims(VIEW, STEP, {}, whole=dict(told.claims))
    lacks_one.show("a", shown_whole, verify)
    assert lacks_one.claims == told.claims


def test_nobody_hears_an_audit_that_its_maker_has_not_signed() -> None:
    book, true = book_of(), audit("b", "c", WRONG)
    for audits, why in (
        ((true._replace(work=CLAIMED),), "has not signed"),
        ((true._replace(by=9),), "nobody's work"),
        ((true._replace(work=b"short"),), "nobody's work"),
        ((true,) * (AUDITS_LIMIT + 1), "shows 65 audits"),
    ):
        with pytest.raises(PeerFault, match=why):
            book.show("a", ShownClaims(VIEW, STEP, {}, audits), verify)
    assert book.heard_audits(b"") == () and not book.contradicted()


def test_what_nobody_drew_is_not_passed_on() -> None:
    """Otherwise a peer that audits everybody unasked would leave no room for the audits that were
    drawn."""
    book = book_of()
    drawn = {(by, peer) for peer, by in book.drawn().items()}
    for by in NAMES:
        for of in NAMES:
            if by != of:
                says(book, by, of, CLAIMED)
    assert {(NAMES[it.by], NAMES[it.of]) for it in book.heard_audits(b"")} == drawn


def test_of_more_words_than_there_is_room_for_doubts_are_passed_on_and_any_of_the_others() -> None:
    names = [f"{number:02}" for number in range(AUDITS_LIMIT + 6)]
    pipelines = (Pipeline((Stage(it, 0, 3, 1),), n, 1) for n, it in enumerate(names))
    book = ClaimBook(VIEW, Plan(tuple(pipelines), (), 1), ALL)
    book.step_begins(STEP)
    for name in names:
        share = msgspec.structs.replace(share_of("a"), parts={}, got={})
        said = Claimed(VIEW, STEP, share, CLAIMED, b"o" * 32, b"c" * 32)
        book._at(STEP).claims[name] = said
    for drawn in book.rounds():
        for peer, by in drawn.items():
            work = WRONG if peer == "07" else CLAIMED
            book.record(by, Audited(VIEW, STEP, peer, work))
    first, second = book.heard_audits(b"1"), book.heard_audits(b"2")
    for audits in (first, second):
        assert len(audits) == AUDITS_LIMIT
        assert sum(it.of == 7 for it in audits) == len(book.rounds())
    assert set(first) != set(second)
