"""A member that more than half convict has no place until long after; one in doubt keeps its
place."""

import msgspec
import pytest

from p2p_dtfm.core.audit.accounts import findings
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.consensus.attempts.chosen import Chosen, chosen_of
from p2p_dtfm.core.membership.bars import (
    BARS_LIMIT,
    FIRST_STEPS,
    agreed_bars,
    barred_at,
    step_of_most,
    united,
    with_convicted,
)
from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    PendingStep,
    PresentView,
    RetainedStep,
)
from p2p_dtfm.core.messages.audit_messages import HeardClaim
from p2p_dtfm.core.messages.message_bounds import require_bounded_part
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Bar, Member, ViewId
from tests.core.audit.parts import NAMES, PLAN, VIEW, share_of, step_of, work_of_share
from tests.core.builders import stated

TERMS = StepTerms(5, 4, 10, 10, 100, 20.0, audits=True)
MEMBERS = {name: Member(name, 1) for name in NAMES}
WRONG = b"0" * 32
HONEST = {name: share_of(name) for name in NAMES}
WORKS = {name: work_of_share(share, name) for name, share in HONEST.items()}
BAR = Bar(VIEW, 7, "c", 1, 7 + FIRST_STEPS, "lies")


def part(name: str, bars: tuple[Bar, ...] = (), step: int = 7, **changes: object) -> Contribution:
    members = tuple(MEMBERS.values())
    said = Contribution(
        member=Member(name, 1),
        number=5,
        record=Signed(name, "record", b"", b""),
        present=PresentView(VIEW, members, PLAN),
        step=step,
        held=dict.fromkeys(range(3), step),
        joiners=(),
        lineages={step: ""},
        bars=bars,
    )
    return msgspec.structs.replace(said, **changes)


def with_step(said: dict[str, Prepared], names: str = NAMES) -> list[Contribution]:
    signed = tuple(stated(item).signed for item in said.values())
    pending = PendingStep(7, "", signed, (0, 1, 2), counts=dict.fromkeys(NAMES, 2))
    return [part(name, pending=pending) for name in names]


def chosen(parts: list[Contribution]) -> Chosen:
    return chosen_of({it.member: it for it in parts}, TERMS, (), lambda rest: 7)


def places(parts: list[Contribution]) -> str:
    return "".join(member.peer_id for member in chosen(parts).participants)


def all_find(liar: str, but: str = "") -> dict[str, dict[str, bytes]]:
    judges = [name for name in NAMES if name != liar]
    return {name: {liar: WORKS[liar] if name in but else WRONG} for name in judges}


def test_one_of_four_that_works_otherwise_is_barred_by_the_word_of_three() -> None:
    # three peers come to something else than c has claimed
    parts = with_step(step_of(HONEST, all_find("c")))
    found = chosen(parts)
    assert places(parts) == "abd"
    (bar,) = found.bars
    assert (bar.peer_id, bar.view, bar.step, bar.count) == ("c", VIEW, 7, 1)
    assert bar.until_step == 7 + FIRST_STEPS and "works otherwise" in bar.reason


@pytest.mark.parametrize("found", [all_find("c"), {}])
def test_who_is_convicted_is_no_better_off_for_saying_another_state(
    found: dict[str, dict[str, bytes]],
) -> None:
    """From other states come other sums, so the evidence against the liar was forgotten."""
    two_claims = {"a": {"c": HeardClaim(b"x" * 16, b"")}} if not found else None
    said = step_of(HONEST, found, two_claims)
    said["c"] = msgspec.structs.replace(said["c"], base="elsewhere")
    assert [bar.peer_id for bar in chosen(with_step(said)).bars] == ["c"]
    honest = step_of(HONEST, {})
    honest["c"] = msgspec.structs.replace(honest["c"], base="elsewhere")
    assert not chosen(with_step(honest)).bars, "a fork alone bars nobody"


def test_a_false_accuser_is_barred_by_the_same_rule() -> None:
    found = all_find("c", but="abd") | {"b": {"c": WRONG}}
    assert [bar.peer_id for bar in chosen(with_step(step_of(HONEST, found))).bars] == ["b"]


def test_two_against_two_bars_nobody() -> None:
    found = {"a": {"c": WRONG}, "b": {"c": WRONG}, "d": {"c": WORKS["c"]}}
    parts = with_step(step_of(HONEST, found))
    (both,) = chosen(parts).conflict.even
    assert both in (("a", "c"), ("b", "c")) and not chosen(parts).bars
    left = {member.peer_id for member in chosen(parts).participants}
    assert left == {"a", "b", "c", "d"} - set(both)


def test_who_is_silent_or_has_come_back_pays_for_no_even_vote_of_then() -> None:
    """Evidence can be passed on for as long as any member of then stays in the view."""
    found = {"a": {"c": WRONG}, "b": {"c": WRONG}, "d": {"c": WORKS["c"]}}
    parts = with_step(step_of(HONEST, found))
    ((one, other),) = chosen(parts).conflict.even
    assert not chosen([it for it in parts if it.member.peer_id != one]).conflict.even
    back = [
        msgspec.structs.replace(it, member=Member(other, 2), present=None, pending=None)
        if it.member.peer_id == other
        else it
        for it in parts
    ]
    assert not chosen(back).conflict.even


def test_half_of_all_stage_holders_bar_nobody_though_most_of_those_that_can_judge_do() -> None:
    """Two of the three that can compute a work again may be colluders of one liar."""
    shares = {n: share_of(n, "cpu-2" if n == "d" else "cpu-1") for n in NAMES}
    works = {n: work_of_share(shares[n], n) for n in NAMES}
    said = step_of(shares, {"a": {"c": WRONG}, "b": {"c": WRONG}})
    found = findings(said, PLAN, PLAN.segments())
    assert set(found.liars) == {"c"} and not found.convicted, works
    assert not chosen(with_step(said)).bars


def test_an_arithmetic_of_its_own_is_no_crime() -> None:
    shares = {n: share_of(n, "cpu-2" if n == "d" else "cpu-1") for n in NAMES}
    found = findings(step_of(shares, {}), PLAN, PLAN.segments(), one_arithmetic=True)
    assert set(found.liars) == {"d"} and not found.convicted


def test_who_signs_two_versions_is_barred_by_its_own_hand() -> None:
    said = step_of(HONEST, {})
    other = stated(msgspec.structs.replace(said["b"], loss_sum=29.0)).signed
    parts = with_step(said)
    pending = parts[0].pending
    assert pending is not None
    more = msgspec.structs.replace(pending, prepared=(*pending.prepared, other))
    parts[0] = msgspec.structs.replace(parts[0], pending=more)
    assert [bar.peer_id for bar in chosen(parts).bars] == ["b"]
    unaudited = msgspec.structs.replace(TERMS, audits=False)
    heard = {it.member: it for it in parts}
    assert not chosen_of(heard, unaudited, (), lambda rest: 7).bars, "as before without audits"


NEXT = PresentView(ViewId(4, "cd" * 32), tuple(MEMBERS.values()), PLAN)
NOWHERE = [(VIEW, 0), (VIEW, 5), (VIEW, 1 << 50), (VIEW, 1 << 60), (ViewId(1 << 60, "x" * 999), 7)]


def two_of(peer: str, view: ViewId, step: int) -> tuple[Signed, ...]:
    """Two unlike Prepared of one step, both signed by the peer itself."""
    made = msgspec.structs.replace(step_of(HONEST, {})["c"], view=view, step=step, peer_id=peer)
    other = msgspec.structs.replace(made, loss_sum=29.0)
    return stated(made).signed, stated(other).signed


def brought_by(name: str, parts: list[Contribution], more: tuple[Signed, ...]) -> None:
    """Have a contribution bring these beside what it passes on in any case."""
    (index,) = [n for n, it in enumerate(parts) if it.member.peer_id == name]
    pending = parts[index].pending or PendingStep(7, "", (), ())
    pending = msgspec.structs.replace(pending, prepared=(*pending.prepared, *more))
    parts[index] = msgspec.structs.replace(parts[index], pending=pending)


@pytest.mark.parametrize(("view", "step"), [(VIEW, 7), *NOWHERE])
def test_keys_without_a_stage_are_nobody_whatever_they_have_signed(view: ViewId, step: int) -> None:
    """Otherwise whoever makes two keys fills the list with them."""
    parts = with_step(step_of(HONEST, {}))
    brought_by("d", parts, two_of("stranger", view, step))
    found = chosen(parts)
    assert not found.bars and not found.conflict.liars and places(parts) == NAMES


@pytest.mark.parametrize(("view", "step"), NOWHERE)
def test_nobody_is_barred_from_a_step_that_none_is_in_and_a_verdict_stays_what_it_is(
    view: ViewId, step: int
) -> None:
    """Steps of which nothing is left could be signed anew at any time. A bar from a step that
    cannot be was in all that the members said from then on, and everybody refused their words."""
    parts = with_step(step_of(HONEST, {}))
    brought_by("d", parts, two_of("c", view, step))
    assert places(parts) == "abd" and not chosen(parts).bars
    parts = with_step(step_of(HONEST, all_find("c")))
    brought_by("c", parts, two_of("c", view, step))
    (bar,) = chosen(parts).bars
    assert (bar.view, bar.step, bar.until_step) == (VIEW, 7, 7 + FIRST_STEPS)
    require_bounded_part(part("a", (bar,)), "a")


@pytest.mark.parametrize("step", [1, 90])
def test_two_claims_in_a_step_that_none_is_in_bar_nobody(step: int) -> None:
    said = step_of(HONEST, {}, {"d": {"c": HeardClaim(b"x" * 16, b"")}})
    then = {it: msgspec.structs.replace(said[it], step=step) for it in "cd"}
    parts = with_step(step_of(HONEST, {}))
    brought_by("d", parts, tuple(stated(it).signed for it in then.values()))
    assert not chosen(parts).bars and "c" not in places(parts)


def test_a_newcomers_word_of_steps_is_nobodys() -> None:
    parts = [*with_step(step_of(HONEST, {})), part("e", present=None)]
    brought_by("e", parts, two_of("c", VIEW, 7))
    assert not chosen(parts).bars and places(parts) == NAMES + "e"


def test_who_says_that_it_is_elsewhere_is_barred_all_the_same() -> None:
    parts = with_step(step_of(HONEST, all_find("c")), "bcd")
    away = PendingStep(3, "", (), ())
    parts[1] = msgspec.structs.replace(parts[1], pending=away)
    assert [bar.peer_id for bar in chosen(parts).bars] == ["c"]


def test_who_was_barred_by_a_view_that_only_part_has_taken_over_is_barred_again() -> None:
    """Those that took the view over are no longer in the step, and alone they are too few to name
    the bar."""
    in_step = with_step(step_of(HONEST, all_find("c")), "b")
    later = part("a", (BAR,), present=NEXT, pending=PendingStep(7, "", (), ()))
    away = part("d", present=NEXT, pending=PendingStep(3, "", (), ()))
    (bar,) = chosen([later, *in_step, away]).bars
    assert (bar.peer_id, bar.view, bar.step, bar.count) == ("c", VIEW, 7, 1)
    unbarred = msgspec.structs.replace(later, bars=())
    assert not chosen([unbarred, *in_step, away]).bars


@pytest.mark.parametrize("judges", ["abc", "ab"])
def test_who_is_gone_is_barred_by_more_than_half_though_it_has_no_stage_any_more(
    judges: str,
) -> None:
    said = step_of(HONEST, {name: {"gone": WRONG} for name in judges}, told="")
    for name in judges:
        account = said[name].audit
        assert account is not None
        account = msgspec.structs.replace(account, disputed={"gone": True})
        said[name] = msgspec.structs.replace(said[name], audit=account)
    barred = [bar.peer_id for bar in chosen(with_step(said)).bars]
    assert barred == (["gone"] if judges == "abc" else [])


def test_two_versions_of_the_last_step_of_the_view_before_are_found_out_in_the_next_one() -> None:
    """Members that committed by one of the two versions are in other states than the rest."""
    for stays in (NEXT, msgspec.structs.replace(NEXT, plan=None)):
        one, other = two_of("c", VIEW, 6)
        parts = [
            part(
                name,
                present=stays,
                pending=PendingStep(7, "", (), ()),
                retained=RetainedStep(VIEW, 6, "", None, (), (one if name in "ab" else other,)),
            )
            for name in NAMES
        ]
        found = chosen(parts)
        assert set(found.conflict.liars) == {"c"}
        barred = [(bar.peer_id, bar.view, bar.step) for bar in found.bars]
        assert barred == ([("c", VIEW, 6)] if stays.plan is not None else [])


@pytest.mark.parametrize(
    "namers, has_place", [("", True), ("a", True), ("ab", True), ("abd", False), ("abcd", False)]
)
def test_only_the_word_of_more_than_half_keeps_one_out(namers: str, has_place: bool) -> None:
    parts = [part(name, (BAR,) if name in namers else ()) for name in NAMES]
    assert ("c" in places(parts)) == has_place
    assert chosen(parts).bars == (() if has_place else (BAR,))


def test_parts_of_a_split_swarm_that_have_each_convicted_one_do_not_forget_it() -> None:
    there = Bar(ViewId(4, "cd" * 32), 9, "c", 1, 9 + FIRST_STEPS, "lies there")
    parts = [part(name, (BAR if name in "ab" else there,)) for name in NAMES]
    assert "c" not in places(parts) and chosen(parts).bars == (BAR,)
    parts = [part(name, (BAR if name == "a" else there,)) for name in NAMES]
    assert chosen(parts).bars == (there,)


@pytest.mark.parametrize("until", [8, 1 << 60])
def test_nobody_alone_draws_out_a_bar_or_ends_it(until: int) -> None:
    other = msgspec.structs.replace(BAR, until_step=until, count=9)
    parts = [part(name, (other if name == "d" else BAR,)) for name in NAMES]
    assert chosen(parts).bars == (BAR,)
    twice = [part(name, (BAR, other) if name == "d" else ()) for name in NAMES]
    assert not chosen(twice).bars, "one voice for a peer, however many bars it names"


def test_newcomers_have_no_word_where_there_are_members() -> None:
    parts = [part(name) for name in "ab"]
    parts += [part(name, (BAR,), present=None) for name in ("x", "y", "z", "c")]
    assert not chosen(parts).bars and "c" in places(parts)


def test_who_was_left_out_has_no_word_though_a_colluder_brings_the_old_view_along() -> None:
    """d is still a member, and says that it is in the view in which c and e were."""
    old = PresentView(VIEW, tuple(Member(name, 1) for name in "abcde"), PLAN)
    new = PresentView(ViewId(4, "cd" * 32), tuple(Member(name, 1) for name in "abd"), PLAN)
    bars = tuple(msgspec.structs.replace(BAR, peer_id=name) for name in "ce")
    parts = [part(name, bars, present=new) for name in "ab"]
    parts += [part(name, present=old, step=1 << 50) for name in "cde"]
    assert places(parts) == "abd" and chosen(parts).bars == bars
    assert step_of_most(parts) == 7


def test_one_that_is_first_in_a_view_has_no_more_of_a_word_than_its_others() -> None:
    new = PresentView(ViewId(4, "cd" * 32), tuple(MEMBERS.values()), PLAN)
    false = tuple(msgspec.structs.replace(BAR, peer_id=name) for name in "abc")
    parts = [*map(part, "abc"), part("d", false, present=new)]
    assert places(parts) == NAMES and not chosen(parts).bars


def test_after_a_restart_of_all_those_that_remember_decide() -> None:
    parts = [part(name, (BAR,) if name in "abd" else (), present=None) for name in NAMES]
    assert places(parts) == "abd"


def test_a_bar_ends_and_the_next_one_lasts_twice_as_long() -> None:
    until = BAR.until_step
    at_end = [part(name, (BAR,), step=until) for name in NAMES]
    assert places(at_end) == NAMES and chosen(at_end).bars == (BAR,), "it is remembered"
    again = with_convicted((BAR,), {"c": (ViewId(9, "f" * 64), until + 5)}, {"c": "lies"})
    assert [(it.count, it.until_step) for it in again] == [(2, until + 5 + 2 * FIRST_STEPS)]
    assert with_convicted((BAR,), {"c": (VIEW, 7)}, {}) == (BAR,), "one verdict counts once"


def test_nobody_alone_has_a_bar_end_by_a_step_that_it_claims() -> None:
    parts = [part(name, (BAR,), step=1 << 50 if name == "d" else 7) for name in NAMES]
    assert step_of_most(parts) == 7 and "c" not in places(parts)


def test_bars_are_bounded_and_the_newest_are_kept() -> None:
    many = [Bar(ViewId(n, ""), n, f"p{n:04}", 1, n + 400, "") for n in range(BARS_LIMIT + 9)]
    kept = united(reversed(many))
    assert kept == tuple(many[9:])
    assert set(barred_at(kept, 420)) == {it.peer_id for it in many if it.until_step > 420}


def test_bars_that_are_over_are_forgotten_before_those_in_force() -> None:
    """Otherwise whoever makes many keys has a colluder's long bar forgotten."""
    colluder = Bar(ViewId(1, ""), 1, "colluder", 5, 1 + 16 * FIRST_STEPS, "")
    many = [Bar(ViewId(n, ""), n, f"p{n:04}", 1, n + 400, "") for n in range(2, 2 * BARS_LIMIT)]
    assert colluder in united([colluder, *many]) and len(united([colluder, *many])) == BARS_LIMIT


def test_of_two_bars_of_one_peer_the_longer_one_stays() -> None:
    longer = msgspec.structs.replace(BAR, count=2, until_step=2000)
    assert united((longer, BAR)) == united((BAR, longer)) == (longer,)


def test_nobody_is_barred_in_a_step_of_honest_members() -> None:
    ring = {name: {other: WORKS[other]} for name, other in zip(NAMES, "bcda", strict=True)}
    assert not agreed_bars(with_step(step_of(HONEST, ring)))
    assert not chosen(with_step(step_of(HONEST, ring))).bars
