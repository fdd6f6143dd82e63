"""All updates are clipped by the norms of what several peers hold. Each norm is part of the work of
the peer that summed it. So audits say who is right, however many of a stage's holders lie
together."""

import math

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import fault_of_share
from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.judging import NORMS_LIMIT
from p2p_dtfm.core.audit.work import (
    NO_MICROBATCH_LIMIT,
    WORK_BYTES,
    claim_digest,
    sums_of_others,
    work_of,
)
from p2p_dtfm.core.commit.judgement import Conflict, conflict_of, fault_of
from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Audited, Claimed, Share
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from tests.core.audit import parts
from tests.core.audit.test_boundaries import HONEST, NAMES, PLAN, SEGMENTS, VIEW, share_of, step_of
from tests.core.audit.test_boundaries import work_of as work_of_share
from tests.core.builders import run_spec

JUNK = b"0" * WORK_BYTES
ROWS = tuple(
    Pipeline(tuple(Stage(name, at, at + 1, 1) for at, name in enumerate(row)), 2 * n, 2)
    for n, row in enumerate(("abcd", "efgh"))
)
EIGHT = Plan(ROWS, (), 1)
"""A plan in which two peers hold each stage."""


def rows_of(*rows: str) -> Plan:
    """Pipelines of two stages."""
    stages = [(Stage(one, 0, 1, 1), Stage(other, 1, 3, 1)) for one, other in rows]
    return Plan(tuple(Pipeline(it, 2 * n, 2) for n, it in enumerate(stages)), (), 1)


def stating(share: Share, norms: dict[int, tuple[float, ...]]) -> Share:
    return msgspec.structs.replace(share, norms=norms)


def lied(liars: str, *about: str) -> dict[str, Share]:
    """These peers of PLAN's first stage state other norms of what they have summed."""
    wrong = tuple(
        norm * (100.0 if holder in about else 1.0)
        for holder, norm in zip(SEGMENTS[0].holders, HONEST["a"].norms[0], strict=True)
    )
    return {**HONEST, **{liar: stating(HONEST[liar], {0: wrong}) for liar in liars}}


def judged(
    shares: dict[str, Share],
    others: str = "",
    judges: str = NAMES,
    liars: str = "",
    *,
    one_arithmetic: bool = False,
    kept_microbatches: int = NO_MICROBATCH_LIMIT,
) -> Conflict:
    """What the honest peers judge. Each of them computes again what a peer has summed where others
    state another norm of it. `others`: the peers whose sums have come otherwise to all others of
    the stage."""
    true = {peer: work_of_share(HONEST[peer], peer) for peer in shares}
    makers = book_of(shares).unlike_norms()
    found = {it: {peer: true[peer] for peer in makers if peer != it} for it in judges}
    said = step_of(shares, {it: found[it] for it in judges if it not in liars})
    for peer in others:
        for holder in set(SEGMENTS[0].holders) - {peer}:
            sums = list(said[holder].sums[0])
            sums[SEGMENTS[0].holders.index(peer)] = b"otherwise summed"
            said[holder] = msgspec.structs.replace(said[holder], sums={0: tuple(sums)})
    terms = msgspec.structs.replace(
        terms_of(run_spec()), one_arithmetic=one_arithmetic, kept_microbatches=kept_microbatches
    )
    return conflict_of(said, PLAN, terms)


def book_of(shares: dict[str, Share], plan: Plan = PLAN, rate: int = 0) -> ClaimBook:
    """The claims of a view's second step, in which nobody is drawn."""
    book = ClaimBook(VIEW, plan, rate)
    for step in (7, 8):
        book.step_begins(step)
        for peer, share in shares.items():
            opening, following = (peer.encode() * 31 + bytes([n]) for n in (step, step + 1))
            work = work_of_share(share, peer, plan)
            claim = Claimed(VIEW, step, share, work, opening, commitment_to(following))
            book.record(peer, claim)
    return book


@pytest.mark.parametrize(
    ("norms", "fault"),
    [
        ({}, "other sums"),
        ({0: (1.0, 2.0)}, "other sums"),
        ({0: (1.0, 2.0, 3.0), 1: (1.0, 2.0, 3.0)}, "other sums"),
        ({0: (1.0, 2.0, math.nan)}, "that has none"),
        ({0: (1.0, -2.0, 3.0)}, "that has none"),
        ({0: (1.0, 2.0, 30.0)}, ""),
    ],
)
def test_a_claim_has_a_norm_of_what_each_holder_has_summed(
    norms: dict[int, tuple[float, ...]], fault: str
) -> None:
    found = fault_of_share(stating(HONEST["a"], norms), PLAN, SEGMENTS, "a")
    assert fault in found and bool(found) == bool(fault)


def test_where_all_hold_the_same_nothing_of_it_is_said() -> None:
    """Most of the holders are right."""
    said = parts.share_of("a")
    assert said.norms == {} and not fault_of_share(said, parts.PLAN, parts.PLAN.segments(), "a")
    more = stating(said, {0: (1.0,) * 4})
    assert "other sums" in fault_of_share(more, parts.PLAN, parts.PLAN.segments(), "a")


def test_what_is_claimed_is_covered_and_what_one_has_summed_is_part_of_its_work() -> None:
    said = step_of(HONEST, {})["a"]
    assert said.audit is not None
    for norms, is_another in (({0: (9.0, 2.0, 3.0)}, True), ({0: (1.0, 2.0, 9.0)}, False)):
        share = stating(HONEST["a"], norms)
        account = msgspec.structs.replace(said.audit, share=share)
        other = msgspec.structs.replace(said, audit=account)
        assert (work_of(other, SEGMENTS) != work_of(said, SEGMENTS)) == is_another
        assert claim_digest(share, JUNK) != claim_digest(HONEST["a"], JUNK)


def test_a_prepared_states_the_norm_to_which_its_sums_come() -> None:
    said = step_of(HONEST, {})["a"]
    assert fault_of(said, PLAN) == ""
    other = msgspec.structs.replace(said, squared_norms={0: 6.5})
    assert "than its sums come to" in fault_of(other, PLAN)


def test_two_that_hold_a_stage_alone_cannot_state_a_norm_that_audits_do_not_judge() -> None:
    """Nobody could check such a norm, however often audits came."""
    honest = {peer: share_of(peer, EIGHT) for peer in "abcdefgh"}
    wrong = {peer: stating(honest[peer], {2: (1e30, 1e30)}) for peer in "cg"}
    shares = {**honest, **wrong}
    assert not conflict_of(step_of(shares, {}, EIGHT), EIGHT).reason, "nobody contradicts them"
    true = {peer: work_of_share(honest[peer], peer, EIGHT) for peer in "cg"}
    said = step_of(shares, {judge: true for judge in "abdefh"}, EIGHT)
    assert not any(fault_of(it, EIGHT) for it in said.values())
    found = conflict_of(said, EIGHT)
    assert set(found.liars) == set(found.convicted) == {"c", "g"} and not found.doubts


@pytest.mark.parametrize("about", ["ac", "ace", "a", "e", "c"])
def test_of_three_holders_two_that_state_another_norm_go_and_the_third_does_not(about: str) -> None:
    """The honest holder was the odd one of three. It does not matter what the liars say of what
    each of the three has summed."""
    shares = lied("ac", *about)
    found = judged(shares, liars="ac")
    expected = set("ac") if "e" in about or about == "ac" else {about}
    assert set(found.liars) == set(found.convicted) == expected
    assert not found.doubts and not found.even


def test_who_states_another_norm_of_an_honest_one_s_sums_goes_and_that_one_does_not() -> None:
    found = judged(lied("a", "c"), liars="a")
    assert set(found.liars) == set(found.convicted) == {"a"} and not found.doubts
    assert "another norm of what c has summed" in found.liars["a"]


def test_another_reason_to_go_spares_nobody_the_bar() -> None:
    """A liar that named an arithmetic of its own beside a false norm went for the arithmetic, and
    was soon back. Nor do two liars spare each other the bar by stating other norms of each other's
    sums."""
    shares = lied("a", "c")
    alone = msgspec.structs.replace(shares["a"], arithmetic="gpu-x")
    found = judged({**shares, "a": alone}, liars="a", one_arithmetic=True)
    assert set(found.liars) == set(found.convicted) == {"a"} and not found.doubts
    both = {**lied("a", "c"), "c": lied("c", "a")["c"]}
    found = judged(both, liars="ac")
    assert set(found.liars) == set(found.convicted) == {"a", "c"}


def test_who_has_got_other_sums_is_in_doubt_with_their_maker_as_ever() -> None:
    """From other sums come other norms, and nobody lies who says so."""
    shares = lied("ce", "a")
    found = judged(shares, others="a")
    assert set(found.doubts) == {("a", "c"), ("a", "e")} and not found.liars


def test_where_others_could_judge_and_have_not_it_is_one_word_against_another() -> None:
    found = judged(lied("a", "c"), judges="")
    assert set(found.doubts) == {("a", "c")} and not found.liars
    assert "unlike norms" in found.doubts["a", "c"]


@pytest.mark.parametrize("kept", [1, NO_MICROBATCH_LIMIT])
def test_where_nobody_can_judge_most_of_those_who_hold_the_same_decide(kept: int) -> None:
    """Without audits, too, most decide: an honest holder was in doubt with the liar. Nobody is
    barred for it."""

    def found_of(shares: dict[str, Share], others: str = "") -> Conflict:
        if kept > 1:
            shares = {
                peer: msgspec.structs.replace(share, arithmetic=f"cpu-{peer}")
                for peer, share in shares.items()
            }
        return judged(shares, others, judges="", kept_microbatches=kept)

    found = found_of(lied("a", "c"))
    assert set(found.liars) == {"a"} and not found.convicted and not found.doubts
    assert "another norm of what c has summed" in found.liars["a"]
    assert set(found_of(lied("c", "c")).liars) == {"c"}, "of its own"
    found = found_of(lied("a", "c"), others="c")
    assert not found.liars and set(found.doubts) == {("a", "c"), ("c", "e")}
    each = {it: stating(HONEST[it], {0: (1.0, float(n), 3.0)}) for n, it in enumerate("ace", 2)}
    found = found_of({**HONEST, **each})
    assert not found.liars and set(found.doubts) == {("a", "c"), ("c", "e")}


def test_of_whose_sums_unlike_norms_are_claimed_all_compute_the_work_again() -> None:
    """This holds however rarely the run audits, since an auditor that is drawn alone may lie with
    the makers."""
    assert book_of(HONEST).disputed() == [] and not book_of(HONEST).drawn()
    book = book_of(lied("ac", "a"))
    assert book.unlike_norms() == {"a"} and book.disputed() == ["a"] and not book.drawn()
    assert set(book.borrowers()) == set("bdf")
    drawn = book_of(lied("ac", "a"), rate=1_000_000)
    for peer, by in drawn.drawn().items():
        drawn.record(by, Audited(VIEW, 8, peer, COULD_NOT))
    assert drawn.disputed() == ["a"]


def test_of_many_whose_norms_one_disputes_two_are_computed_again_and_it_goes() -> None:
    """Everybody computed all works again, one after the other. Slow honest members were left out
    meanwhile."""
    plan = rows_of("ab", "cd", "ef", "gh", "ij", "kl")
    honest = {peer: share_of(peer, plan) for peer in "abcdefghijkl"}
    wrong = stating(honest["a"], {0: (1.0, 20.0, 30.0, 40.0, 50.0, 60.0)})
    shares = {**honest, "a": wrong}
    book = book_of(shares, plan)
    makers = book.disputed()
    assert len(makers) == NORMS_LIMIT == 2 and set(makers) < set("cegik")
    assert book.disputes() == {
        it: tuple(maker for maker in makers if maker != it) for it in "abcdefghijkl"
    }
    works = {it: work_of_share(honest[it], it, plan) for it in makers}
    found = conflict_of(step_of(shares, dict.fromkeys("bcdefghijkl", works), plan), plan)
    assert set(found.liars) == set(found.convicted) == {"a"} and not found.doubts
    found = conflict_of(step_of(shares, {}, plan), plan)
    assert set(found.doubts) == {("a", it) for it in "cegik"}, "where nobody has computed them"


def test_whose_norms_most_dispute_are_computed_again_if_that_can_be() -> None:
    """The choice must not follow the seed. A liar that claims last would have a colluder chosen,
    and say that other sums came from that colluder. Nor is a work chosen that nobody can judge."""
    plan = rows_of("ab", "cd", "ef", "gh", "ij", "kl")
    honest = {peer: share_of(peer, plan) for peer in "abcdefghijkl"}
    wrong = {0: (1.0, 20.0, 30.0, 40.0, 5.0, 6.0)}
    other = {0: (1.0, 20.0, 3.0, 40.0, 50.0, 6.0)}
    lies = {"a": stating(honest["a"], wrong), "k": stating(honest["k"], other)}
    assert book_of({**honest, **lies}, plan).unlike_norms() == set("cg"), "both say so of these"
    alone = msgspec.structs.replace(honest["g"], arithmetic="gpu-x")
    shares = {**honest, **lies, "g": alone}
    found = book_of(shares, plan).unlike_norms()
    assert "c" in found and "g" not in found and len(found) == 2


def test_more_than_half_of_all_are_believed_of_a_norm_as_of_sums() -> None:
    """This holds where these peers hold the segment."""
    stages = [(Stage(name, 0, 3, 1),) for name in "abc"] + [
        (Stage("d", 0, 1, 1), Stage("e", 1, 3, 1))
    ]
    plan = Plan(tuple(Pipeline(it, 2 * n, 2) for n, it in enumerate(stages)), (), 1)
    honest = {peer: share_of(peer, plan) for peer in "abcde"}
    wrong = stating(honest["d"], {n: (*it[:3], 90.0) for n, it in honest["d"].norms.items()})
    found = conflict_of(step_of({**honest, "d": wrong}, {}, plan), plan)
    assert set(found.liars) == set(found.convicted) == {"d"} and not found.doubts


def test_a_claim_is_held_against_the_norms_of_the_sums_that_came_from_its_maker() -> None:
    said = step_of(HONEST, {})["c"]
    assert said.audit is not None
    came = sums_of_others("c", SEGMENTS, dict(said.sums), said.audit.share.norms)
    assert came == {it: work_of_share(HONEST[it], it)[WORK_BYTES // 2 :] for it in "ae"}
    book = book_of(lied("a", "a"))
    book.sums = came
    assert book.unlike_to("c") == ["a"]


def test_who_has_claimed_another_norm_and_not_spoken_yet_is_not_convicted() -> None:
    """An honest peer that got other sums has claimed the same norm, and everybody has found their
    maker's work as claimed. Only that peer's Prepared says that other sums came."""
    shares, true = lied("a", "c"), work_of_share(HONEST["c"], "c")
    said = step_of(shares, {judge: {"c": true} for judge in "bdef"})
    sums = said["a"].sums[0]
    said["a"] = msgspec.structs.replace(
        said["a"], sums={0: (sums[0], b"otherwise summed", sums[2])}
    )
    spoken = conflict_of(said, PLAN)
    assert set(spoken.doubts) == {("a", "c")} and not spoken.liars
    del said["a"]
    silent = conflict_of(said, PLAN)
    assert not silent.liars and not silent.convicted and not silent.doubts


def test_prepared_of_some_say_nothing_of_norms() -> None:
    """All members speak when the step is done again."""
    said: dict[str, Prepared] = step_of(lied("ac", *"ace"), {})
    del said["f"]
    found = conflict_of(said, PLAN)
    assert not found.liars and not found.doubts and not found.even
