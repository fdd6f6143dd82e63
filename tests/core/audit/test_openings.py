"""A peer that opens one thing to some and another to others has them draw unlike auditors. Each
group would wait for an auditor that was drawn nowhere else, and accuse it."""

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import findings
from p2p_dtfm.core.audit.claim_book import ClaimBook
from p2p_dtfm.core.audit.work import claim_digest, heard_claim, require_signed, signed_claim
from p2p_dtfm.core.messages.audit_messages import (
    Audited,
    Claimed,
    HeardClaim,
    ShownClaims,
)
from p2p_dtfm.core.messages.prepared import open_prepared, sign_prepared
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.audit.parts import NAMES, PLAN, VIEW, share_of, step_of, work_of_share

ALL = 1_000_000
STEP = 7
LIAR = "d"
SEGMENTS = PLAN.segments()


def claim(name: str, opening: bytes = b"o" * 32, commitment: bytes = b"c" * 32) -> Claimed:
    said = Claimed(VIEW, STEP, share_of(name), b"w" * 32, opening, commitment)
    return signed_claim(said, name, sign_for(name))


def book_with(liars: Claimed) -> ClaimBook:
    book = ClaimBook(VIEW, PLAN, ALL)
    book.step_begins(STEP)
    for name in NAMES:
        book.record(name, liars if name == LIAR else claim(name))
    return book


def shown(book: ClaimBook) -> ShownClaims:
    return ShownClaims(VIEW, STEP, {name: heard_claim(it) for name, it in book.claims.items()})


def test_what_is_opened_and_committed_to_is_signed() -> None:
    for change in ({"opening": b"x" * 32}, {"commitment": b"x" * 32}):
        with pytest.raises(PeerFault, match="not signed"):
            require_signed(msgspec.structs.replace(claim("a"), **change), "a", verify)


def test_who_claims_two_things_to_one_is_convicted_by_what_that_one_has_heard() -> None:
    """The second claim was refused, and forgotten."""
    book, second = book_with(claim(LIAR)), claim(LIAR, b"x" * 32)
    with pytest.raises(PeerFault, match="two different claims"):
        book.record(LIAR, second)
    assert book.unlike() == {LIAR: heard_claim(second)}
    same = msgspec.structs.replace(claim("a"), signature=b"another way to sign it")
    with pytest.raises(PeerFault, match="two different claims"):
        book.record("a", same)
    assert set(book.unlike()) == {LIAR}, "one thing is no two"


def test_two_openings_draw_unlike_auditors_and_nobody_is_waited_for_once_they_are_shown() -> None:
    first = book_with(claim(LIAR))
    others = (book_with(claim(LIAR, bytes([n]) * 32)) for n in range(20))
    second = next(it for it in others if it.drawn() != first.drawn())
    assert first.silent(first.drawn()) and second.silent(second.drawn())
    first.show("b", shown(second), verify)
    second.show("a", shown(first), verify)
    for book in (first, second):
        assert book.silent(book.drawn()) == () and book.disputed() == []
        assert book.drawn_instead() == ()
    by = first.drawn()["b"]
    first.record(by, Audited(VIEW, STEP, "b", b"x" * 32))
    assert first.disputed() == ["b"], "what was said still counts"
    first.step_begins(STEP + 1)
    for name in NAMES:
        said = Claimed(VIEW, STEP + 1, share_of(name), b"w" * 32, b"o" * 32, b"c" * 32)
        first.record(name, said)
    assert first.silent(first.drawn()), "of that step alone"


def test_a_claim_that_comes_late_is_held_against_what_was_shown_before() -> None:
    book = ClaimBook(VIEW, PLAN, ALL)
    book.step_begins(STEP)
    other = claim(LIAR, b"x" * 32)
    book.show("b", ShownClaims(VIEW, STEP, {LIAR: heard_claim(other)}), verify)
    assert book.unlike() == {}
    for name in NAMES:
        book.record(name, claim(name))
    assert book.unlike() == {LIAR: heard_claim(other)}
    assert book.silent(book.drawn()) == ()


def test_a_second_claim_that_was_only_shown_convicts_its_maker() -> None:
    """Otherwise the second claim would free everybody from waiting for the liar's auditor, and that
    auditor alone would be blamed."""
    shares = {name: share_of(name) for name in NAMES}
    said = step_of(shares, {"a": {LIAR: b"0" * 32}}, told="")
    second = HeardClaim(claim_digest(shares[LIAR], b"w" * 32, b"x" * 16), b"")
    account = said["b"].audit
    assert account is not None
    told = msgspec.structs.replace(account, unlike={LIAR: second})
    said["b"] = msgspec.structs.replace(said["b"], audit=told)
    found = findings(said, PLAN, SEGMENTS)
    assert set(found.liars) == found.convicted == {LIAR}


def test_a_second_claim_in_an_account_is_signed_by_its_maker() -> None:
    said = step_of({name: share_of(name) for name in NAMES}, {})["a"]
    assert said.audit is not None
    true = heard_claim(claim(LIAR, b"x" * 32))
    for second, is_true in ((true, True), (true._replace(claim=b"y" * 16), False)):
        account = msgspec.structs.replace(said.audit, heard={}, unlike={LIAR: second})
        signed = sign_prepared(msgspec.structs.replace(said, audit=account), sign_for("a"))
        if is_true:
            assert open_prepared(signed, verify).audit == account
        else:
            with pytest.raises(PeerFault, match="has not signed"):
                open_prepared(signed, verify)


def test_claims_shown_as_they_were_heard_change_nothing() -> None:
    book = book_with(claim(LIAR))
    waited = book.silent(book.drawn())
    book.show("b", shown(book), verify)
    resigned = heard_claim(claim(LIAR))._replace(signature=b"another")
    book.show("b", ShownClaims(VIEW, STEP, {LIAR: resigned}), verify)
    book.show("b", ShownClaims(VIEW, STEP + 9, {LIAR: resigned}), verify)
    assert book.silent(book.drawn()) == waited != ()


def test_nobody_is_freed_from_an_audit_by_claims_that_nobody_made() -> None:
    book = book_with(claim(LIAR))
    waited = book.silent(book.drawn())
    true = heard_claim(claim(LIAR))
    forged = (
        true._replace(claim=b"x" * 16),
        HeardClaim(b"", b""),
        HeardClaim(b"x" * 16, b"s" * 5000),
    )
    for heard in forged:
        with pytest.raises(PeerFault, match="has not signed"):
            book.show("b", ShownClaims(VIEW, STEP, {LIAR: heard}), verify)
    for sender, heard_of in (("nobody", LIAR), ("b", "nobody")):
        with pytest.raises(PeerFault, match="without a stage"):
            book.show(sender, ShownClaims(VIEW, STEP, {heard_of: true}), verify)
    assert book.silent(book.drawn()) == waited


def test_it_is_convicted_by_its_own_signatures_whether_its_prepared_comes_or_not() -> None:
    """The work of the liar is the same to all."""
    shares = {name: share_of(name) for name in NAMES}
    other = claim_digest(shares[LIAR], work_of_share(shares[LIAR], LIAR), b"x" * 16)
    said = step_of(shares, {}, {"a": {LIAR: HeardClaim(other, b"")}})
    for told in (said, {name: it for name, it in said.items() if name != LIAR}):
        found = findings(told, PLAN, SEGMENTS)
        assert set(found.liars) == found.convicted == {LIAR} and not found.doubts
        assert "one thing to some" in found.liars[LIAR]


def test_it_accounts_for_the_openings_that_it_has_told() -> None:
    said = step_of({name: share_of(name) for name in NAMES}, {})
    account = said[LIAR].audit
    assert account is not None
    forged = msgspec.structs.replace(account, openings=b"x" * 16)
    said[LIAR] = msgspec.structs.replace(said[LIAR], audit=forged)
    found = findings(said, PLAN, SEGMENTS)
    assert found.convicted == {LIAR} and "accounts for another" in found.liars[LIAR]


def test_another_view_has_other_claims() -> None:
    said = msgspec.structs.replace(claim("a"), view=ViewId(VIEW.number + 1, VIEW.snapshot))
    with pytest.raises(PeerFault, match="not signed"):
        require_signed(said, "a", verify)
