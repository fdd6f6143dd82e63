"""Who is audited: known to nobody before all have claimed, and as often as the run spec says."""

import msgspec
import pytest

from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.draw import draw, seed_of
from p2p_dtfm.core.messages.audit_messages import Audited, Claimed
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from tests.core.audit.parts import NAMES, PLAN, VIEW, share_of, two_by_two

ALIKE = dict.fromkeys(NAMES, "cpu-1")
ALL = 1_000_000


def seeds(count: int) -> list[str]:
    return [seed_of("1:ab", step, {"a": bytes([step % 256]) * 32}) for step in range(count)]


def test_at_a_rate_of_one_all_are_audited_and_nobody_audits_more_than_two() -> None:
    for seed in seeds(50):
        found = draw(seed, PLAN, ALIKE, ALL, 100)
        assert set(found) == set(NAMES)
        assert max(map(list(found.values()).count, NAMES)) <= 2
        assert all(peer != auditor for peer, auditor in found.items())


def test_so_many_are_drawn_as_the_rate_says_and_each_auditor_as_often() -> None:
    drawn = [draw(seed, PLAN, ALIKE, 100_000, 100) for seed in seeds(2000)]
    assert 0.08 < sum(map(len, drawn)) / (2000 * len(NAMES)) < 0.12
    by = [auditor for found in drawn for auditor in found.values()]
    assert all(0.15 < by.count(name) / len(by) < 0.35 for name in NAMES)


def test_all_are_drawn_in_the_same_steps_so_that_waits_do_not_add_up() -> None:
    drawn = [draw(seed, PLAN, ALIKE, 100_000, 100) for seed in seeds(2000)]
    assert {len(found) for found in drawn} == {0, len(NAMES)}
    assert 0.08 < sum(map(bool, drawn)) / 2000 < 0.12


def test_another_arithmetic_audits_nobody_and_who_has_the_same_layers_does() -> None:
    unlike = {**ALIKE, "a": "cpu-2", "b": ""}
    assert draw(seeds(1)[0], PLAN, unlike, ALL, 100) == {"c": "d", "d": "c"}
    halves = two_by_two().pipelines
    pairs = {"a": "c", "c": "a", "b": "d", "d": "b"}
    assert draw(seeds(1)[0], Plan(halves, (), 1), ALIKE, ALL, 2) == pairs
    assert draw(seeds(1)[0], Plan(halves, (), 1), ALIKE, ALL, 1) == {}, "too much to be kept"
    assert draw(seeds(1)[0], Plan(halves, (), 1), ALIKE, 0, 2, {"d"}) == {"d": "b"}
    unlike_cuts = (halves[0], Pipeline((Stage("c", 0, 2, 1), Stage("d", 2, 3, 1)), 2, 2))
    found = draw(seeds(1)[0], Plan(unlike_cuts, (), 1), ALIKE, ALL, 2)
    assert found == {"a": "c", "d": "b"}, "of more layers than the other's"


def claim(name: str, step: int, *, opened: bool = True) -> Claimed:
    opening = name.encode() * 31 + bytes([step])
    following = name.encode() * 31 + bytes([step + 1 if opened else 99])
    return Claimed(VIEW, step, share_of(name), b"w" * 32, opening, commitment_to(following))


def claimed(book: ClaimBook, step: int, *, opened: bool = True) -> None:
    book.step_begins(step)
    for name in NAMES:
        assert name in book.not_claimed()
        book.record(name, claim(name, step, opened=opened))
    assert not book.not_claimed()


def test_in_the_first_step_of_a_view_all_are_audited() -> None:
    book = ClaimBook(VIEW, PLAN, 1)
    claimed(book, 7)
    assert set(book.drawn()) == set(NAMES)
    claimed(book, 8)
    assert book.drawn() == {} and book.false_openings() == {}


def test_nobody_opens_another_thing_than_it_has_committed_itself_to() -> None:
    book = ClaimBook(VIEW, PLAN, ALL)
    claimed(book, 7)
    book.step_begins(8)
    forged = msgspec.structs.replace(claim("b", 8), opening=bytes(32))
    for name in NAMES:
        book.record(name, forged if name == "b" else claim(name, 8))
    assert list(book.false_openings()) == ["b"]


def test_what_is_found_unlike_is_disputed() -> None:
    book = ClaimBook(VIEW, PLAN, ALL)
    claimed(book, 7)
    pairs = book.drawn()
    assert set(book.not_audited()) == set(NAMES)
    for peer, auditor in pairs.items():
        book.record(auditor, Audited(VIEW, 7, peer, b"x" * 32 if peer == "c" else b"w" * 32))
    assert not book.not_audited() and book.disputed() == ["c"]


def test_a_claim_is_said_once_and_in_its_form() -> None:
    book = ClaimBook(VIEW, PLAN, ALL)
    book.step_begins(7)
    good = claim("a", 7)
    book.record("a", good)
    book.record("a", good)
    with pytest.raises(PeerFault, match="two different claims"):
        book.record("a", msgspec.structs.replace(good, work=b"v" * 32))
    share = good.share
    for changed in (
        {"work": b""},
        {"opening": b"1"},
        {"commitment": b"1"},
        {"share": msgspec.structs.replace(share, threads=0)},
        {"share": msgspec.structs.replace(share, arithmetic="x" * 65)},
        {"share": msgspec.structs.replace(share, parts={})},
        {"share": msgspec.structs.replace(share, got={0: ()})},
        {"share": msgspec.structs.replace(share, parts={0: (b"short",)})},
    ):
        with pytest.raises(PeerFault):
            book.record("b", msgspec.structs.replace(good, **changed))
    with pytest.raises(PeerFault, match="without a stage"):
        book.record("z", good)
    with pytest.raises(PeerFault, match="while step 7 is open"):
        book.record("b", claim("b", 9))
    book.record("b", claim("b", 8))
    assert book.not_claimed() == ("b", "c", "d")
