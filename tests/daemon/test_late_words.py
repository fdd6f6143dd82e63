"""A member that says that it lacks a claim is told the claim by some others that have heard it, and
not at once."""

import msgspec
import pytest

from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.messages.audit_messages import (
    UNLIKE_LIMIT,
    Audited,
    Claimed,
    ShownClaims,
)
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.daemon.trainer.audited import late_words
from p2p_dtfm.daemon.trainer.audited.late_words import LateWords
from tests.core.audit.parts import NAMES, PLAN, VIEW, share_of

STEP = 7


def claim_of(name: str, step: int = STEP) -> Claimed:
    return Claimed(VIEW, step, share_of(name), b"w" * 32, b"o" * 32, commitment_to(b"o" * 32))


def book_of(names: str = NAMES) -> ClaimBook:
    book = ClaimBook(VIEW, PLAN, 1_000_000)
    book.step_begins(STEP)
    for name in names:
        book.record(name, claim_of(name))
    return book


def test_some_pass_on_a_claim_that_one_says_it_lacks_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds, told = [0.0], list[tuple[str, str, ShownClaims]]()
    monkeypatch.setattr(late_words.now, "monotonic_s", lambda: seconds[0])

    def words_of(me: str) -> LateWords:
        def tell(peer_id: str, said: ShownClaims) -> None:
            told.append((me, peer_id, said))

        return LateWords(me, VIEW, STEP, PLAN, book_of(), tell, lambda: b"")

    others = [words_of(name) for name in "abd"]
    lacks = Work(VIEW, STEP, lacks=(Lack("c", Kind.CLAIM),))
    for at_s, step in ((0.0, STEP), (0.5, STEP), (1.5, STEP - 1)):
        seconds[0] = at_s
        for words in others:
            words.passes_on("a", msgspec.structs.replace(lacks, step=step))
    assert not told, "it may be on its way"
    for at_s in (1.5, 3.0):
        seconds[0] = at_s
        for words in others:
            words.passes_on("a", lacks)
    (said,) = told
    assert said[0] in "bd" and said[1:] == (
        "a",
        ShownClaims(VIEW, STEP, {}, whole={"c": book_of().claims["c"]}),
    )


def test_who_had_to_be_told_of_a_claim_is_told_of_the_next_ones_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member that tells all but one peer was never found out, and made each step take two
    seconds."""
    seconds, told = [0.0], list[tuple[str, ShownClaims]]()
    monkeypatch.setattr(late_words.now, "monotonic_s", lambda: seconds[0])
    books = {me: book_of() for me in "bd"}

    def words_in(step: int) -> list[LateWords]:
        def tell(peer_id: str, said: ShownClaims) -> None:
            told.append((peer_id, said))

        return [LateWords(me, VIEW, step, PLAN, books[me], tell, lambda: b"") for me in "bd"]

    first = words_in(STEP)
    for at_s in (0.0, 1.5):
        seconds[0] = at_s
        for words in first:
            words.passes_on("a", Work(VIEW, STEP, lacks=(Lack("c", Kind.CLAIM),)))
            words.passes_on("spare", Work(VIEW, STEP, lacks=(Lack("d", Kind.CLAIM),)))
    assert len(told) == 1
    told.clear()
    following = words_in(STEP + 1)
    for words in following:
        words.book.step_begins(STEP + 1)
        words.heard()
    assert not told, "it has not claimed yet"
    for words in following:
        for name in NAMES:
            words.book.record(name, claim_of(name, STEP + 1))
            words.heard()
    whole = {"c": claim_of("c", STEP + 1)}
    assert told == [("a", ShownClaims(VIEW, STEP + 1, {}, whole=whole))]
    told.clear()
    for at_s in (2.0, 4.0):
        seconds[0] = at_s
        for words in following:
            words.passes_on("a", Work(VIEW, STEP + 1, lacks=(Lack("c", Kind.CLAIM),)))
    assert len(told) == 1, "once more, if that was lost"


def test_of_whom_says_two_things_of_many_works_all_are_told_a_few_times() -> None:
    """One contradiction is enough for nobody to wait for its maker, and a message tells a view's
    members only a few. Each contradiction from each member to each, for each word, was a flood."""
    told, book = list[ShownClaims](), book_of("abc")
    words = LateWords(
        "a", VIEW, STEP, PLAN, book, lambda peer_id, said: told.append(said), lambda: b""
    )

    def says_two_things(by: str) -> None:
        for of in NAMES:
            for work in (b"w" * 32, b"x" * 32):
                book.record(by, Audited(VIEW, STEP, of, work))
                words.heard()

    says_two_things("c")
    assert not told, "audits cannot be shown yet"
    book.record("d", claim_of("d"))
    says_two_things("d")
    assert len(book.contradicted()) == 8
    assert 0 < len(told) <= UNLIKE_LIMIT * len(NAMES)
    assert all(len(said.audits) >= 2 * UNLIKE_LIMIT for said in told)
