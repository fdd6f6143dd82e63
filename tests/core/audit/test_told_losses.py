"""The maker of a loss is held to what it told before the draw, by all members that it told."""

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import Findings, fault_of_share, findings
from p2p_dtfm.core.audit.boundaries import Due
from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.told_losses import losses_digest, tellers, unlike_losses
from p2p_dtfm.core.messages.audit_messages import Claimed, Share
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from tests.core.audit.parts import (
    LOSS,
    LOSSES,
    NAMES,
    PLAN,
    VIEW,
    share_of,
    step_of,
    two_by_two,
    work_of_share,
)

SEGMENTS = PLAN.segments()
HONEST = {name: share_of(name) for name in NAMES}
FALSE = losses_digest(2 * LOSS, 0.0)
AFTER = Due(trains=False)


def in_a_row(*pipelines: str, stands_in: str = "") -> Plan:
    """Pipelines in which each peer has two microbatches and each stage one layer."""
    return Plan(
        tuple(
            Pipeline(
                tuple(
                    Stage(it, layer, layer + 1, 1, stands_in=it in stands_in and place > 0)
                    for layer, it in enumerate(names)
                ),
                2 * place,
                2,
            )
            for place, names in enumerate(pipelines)
        ),
        (),
        1,
    )


MIXED = Plan((Pipeline((Stage("a", 0, 2, 1),), 0, 2), *in_a_row("--", "bc").pipelines[1:]), (), 1)
"""A plan in which one peer computes the whole model, beside a pipeline."""


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (PLAN, {"a": "bcd", "b": "acd", "c": "abd", "d": "abc"}),
        (two_by_two(), {"a": "b", "b": "d", "c": "d", "d": "b"}),
        (in_a_row("abc", "def"), {"a": "", "b": "c", "c": "f", "d": "", "e": "f", "f": "c"}),
        (
            in_a_row("ab", "cd", "eb", stands_in="b"),
            {"a": "", "b": "d", "c": "d", "d": "b", "e": "b"},
        ),
        (MIXED, {"a": "c", "b": "c", "c": "a"}),
        (in_a_row("abc"), {"a": "", "b": "c", "c": ""}),
        (in_a_row("a"), {"a": ""}),
        (in_a_row("ab", "cb", stands_in="b"), {"a": "", "b": "", "c": "b"}),
    ],
)
def test_who_is_told_by_whom(plan: Plan, told: dict[str, str]) -> None:
    assert {it: "".join(tellers(plan).to(it)) for it in told} == told


def test_who_has_a_stage_before_it_tells_that_with_the_last_that_it_computes() -> None:
    """A peer that computes in two pipelines takes turns between them."""
    assert tellers(in_a_row("abc")).last == {"c": (1, "b")}
    assert tellers(in_a_row("ab", "cb", stands_in="b")).last == {"b": (3, "c")}
    assert tellers(two_by_two()).last == {"b": (1, "a"), "d": (3, "c")}
    assert tellers(MIXED).last == {"a": (1, ""), "c": (3, "b")}
    assert tellers(two_by_two()).first_layer == 1


def with_losses(name: str, **losses: bytes) -> Share:
    return msgspec.structs.replace(HONEST[name], losses=HONEST[name].losses | losses)


def told_falsely(receivers: str, teller: str = "d") -> dict[str, Share]:
    return HONEST | {it: with_losses(it, **{teller: FALSE}) for it in receivers}


def judged(shares: dict[str, Share], found: dict[str, dict[str, bytes]] | None = None) -> Findings:
    return findings(step_of(shares, found or {}), PLAN, SEGMENTS)


def test_honest_claims_fit() -> None:
    assert not any(fault_of_share(it, PLAN, SEGMENTS, name) for name, it in HONEST.items())
    assert not unlike_losses(HONEST) and judged(HONEST) == ({}, {}, set(), {})
    nothing = HONEST | {"a": with_losses("a", d=b"")}
    assert not fault_of_share(nothing["a"], PLAN, SEGMENTS, "a"), "no frame went there"
    assert not unlike_losses(nothing) and not judged(nothing).doubts


@pytest.mark.parametrize(
    ("losses", "cause"),
    [
        ({}, "other losses"),
        (dict.fromkeys("abc", LOSSES), "other losses"),
        (dict.fromkeys("abcde", LOSSES), "other losses"),
        (dict.fromkeys("abcd", LOSSES) | {"a": b""}, "another length"),
        (dict.fromkeys("abcd", LOSSES) | {"b": LOSSES * 2}, "another length"),
    ],
)
def test_a_claim_of_other_losses_than_are_made_and_told_cannot_be(
    losses: dict[str, bytes], cause: str
) -> None:
    share = msgspec.structs.replace(HONEST["a"], losses=losses)
    assert cause in fault_of_share(share, PLAN, SEGMENTS, "a")


def test_after_the_last_step_nothing_is_told() -> None:
    share = msgspec.structs.replace(HONEST["a"], parts={}, got={})
    assert "other losses" in fault_of_share(share, PLAN, SEGMENTS, "a", AFTER)
    share = msgspec.structs.replace(share, losses={})
    assert not fault_of_share(share, PLAN, SEGMENTS, "a", AFTER)


def test_who_told_more_than_half_of_another_loss_is_convicted_and_of_fewer_doubted() -> None:
    for receivers, convicted in (("a", set[str]()), ("ab", set()), ("abc", {"d"})):
        found = judged(told_falsely(receivers))
        assert found.convicted == set(found.liars) == convicted
        assert set(found.doubts) == {(it, "d") for it in receivers}


def test_who_was_told_of_another_loss_is_judged_by_its_whole_work() -> None:
    """Its work does not depend on that loss. Otherwise it would go free for a false word of its
    own."""
    wrong = work_of_share(HONEST["a"], "a")[:16] + bytes(16)
    found = judged(told_falsely("a"), {it: {"a": wrong} for it in "bcd"})
    assert set(found.liars) == found.convicted == {"a"}


def test_who_states_another_loss_than_it_claims_to_have_told_is_convicted_by_its_word() -> None:
    """The maker claims what it has told, and its work states another loss."""
    shares = HONEST | {"d": with_losses("d", d=FALSE)}
    told = dict.fromkeys("abc", FALSE)
    shares |= {it: with_losses(it, d=told[it]) for it in "abc"}
    found = judged(shares)
    assert set(found.liars) == found.convicted == {"d"} and not found.doubts
    assert "another loss than it has claimed" in found.liars["d"]


def claims_of(book: ClaimBook, step: int, shares: dict[str, Share]) -> None:
    book.step_begins(step)
    for name, share in shares.items():
        opening, following = (name.encode() * 31 + bytes([n]) for n in (step, step + 1))
        said = Claimed(VIEW, step, share, bytes(32), opening, commitment_to(following))
        book.record(name, said)


def second_step(shares: dict[str, Share]) -> ClaimBook:
    """The second step of a view in which nobody is drawn."""
    book = ClaimBook(VIEW, PLAN, 0)
    claims_of(book, 7, HONEST)
    claims_of(book, 8, shares)
    return book


def test_who_claims_another_loss_than_it_told_is_audited_in_any_case() -> None:
    assert not second_step(HONEST).drawn()
    late = HONEST | {"d": with_losses("d", d=FALSE)}
    assert set(second_step(late).drawn()) == {"d"} and not second_step(late).misled()
    assert set(second_step(told_falsely("a", "c")).drawn()) == {"c"}


@pytest.mark.parametrize(("names", "auditors"), [("abcdefgh", 2), ("abcde", 2), ("abcd", 1)])
def test_after_the_last_step_each_is_audited_by_more_than_colluders_can_be(
    names: str, auditors: int
) -> None:
    """After the last step no losses are told. A liar that claims last would otherwise lie where
    only its colluder is drawn for it."""
    book = ClaimBook(VIEW, in_a_row(*names), 0, due=lambda step: AFTER)
    shares = {name: Share("cpu-1", 1, {}, {}) for name in names}
    for step in (7, 8):
        claims_of(book, step, shares)
    rounds = book.rounds()
    assert [set(drawn) for drawn in rounds] == [set(names)] * auditors
    assert all(len({drawn[it] for drawn in rounds}) == auditors for it in names)
