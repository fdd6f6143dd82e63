"""A liar says that the step starts from another state than it does. It keeps back what would show
whether it was told so. It holds up no step twice."""

import msgspec
import pytest

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import (
    RETAINED_LIMIT,
    Contribution,
    PendingStep,
    PresentView,
    RetainedStep,
)
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.contradictions import evidence, shows_contradiction
from tests.core.builders import stated

NAMES = "abcd"
MANY = tuple(f"{number:02}" for number in range(RETAINED_LIMIT + 1))
TERMS = StepTerms(5, 4, 10, 10, 100, 20.0)
BEFORE, NOW = ViewId(2, "cd" * 32), ViewId(3, "ab" * 32)
STEP = 31
FALSE = "00" * 32


def plan_of(names: tuple[str, ...] | str) -> Plan:
    pipelines = (Pipeline((Stage(it, 0, 3, 1),), at, 1) for at, it in enumerate(names))
    return Plan(tuple(pipelines), (), 1)


def said(
    peer: str,
    names: tuple[str, ...] | str,
    step: int = STEP,
    base: str = "base",
    view: ViewId = NOW,
    norm: float = 4.0,
) -> Signed:
    tokens, plan = TERMS.microbatch_tokens, plan_of(names)
    held_out = TERMS.held_out_tokens(step, plan, peer)
    made = Prepared(view, step, peer, {0: norm}, 9.0, tokens, 0.0, held_out, None, base)
    sums = {0: tuple(bytes([n]) * 16 for n in range(len(names)))}
    states = dict.fromkeys(range(3), b"s" * 16) if TERMS.tells_states(step) else {}
    return stated(msgspec.structs.replace(made, sums=sums, states=states)).signed


def of_last_step(
    names: tuple[str, ...] | str, liar: str = "", view: ViewId = NOW
) -> tuple[Signed, ...]:
    """What all said of the last step, as heard by those to whom the `liar` tells another norm."""
    step = STEP - 1
    return tuple(said(it, names, step, "before", view, 5.0 if it == liar else 4.0) for it in names)


def part(
    name: str,
    pending: tuple[Signed, ...],
    retained: tuple[Signed, ...] = (),
    names: tuple[str, ...] | str = NAMES,
    view: ViewId = NOW,
) -> Contribution:
    """The contribution of a member that has committed the step before in `view`."""
    return Contribution(
        member=Member(name, 1),
        number=5,
        record=Signed(name, "record", b"", b""),
        present=PresentView(NOW, tuple(Member(n, 1) for n in names), plan_of(names)),
        step=STEP,
        held=dict.fromkeys(range(3), STEP),
        joiners=(),
        pending=PendingStep(STEP, "base", pending, (), counts=dict.fromkeys(names, 1)),
        retained=RetainedStep(view, STEP - 1, "before", None, (), retained),
    )


def with_false_base(
    liar: str, names: tuple[str, ...] | str = NAMES, base: str = FALSE
) -> tuple[Signed, ...]:
    return tuple(said(it, names, base=base if it == liar else "base") for it in names)


def test_who_shows_nothing_of_what_it_was_told_is_out_where_most_show_it() -> None:
    pending, last = with_false_base("c"), of_last_step(NAMES)
    parts = [part(it, pending, last if it != "c" else ()) for it in NAMES]
    assert list(evidence(parts, TERMS).liars) == ["c"]
    says_none = msgspec.structs.replace(parts[2], retained=None)
    assert list(evidence([*parts[:2], parts[3], says_none], TERMS).liars) == ["c"]


def test_a_member_that_was_told_something_else_shows_who_told_it() -> None:
    """The member stays, whether or not the liar shows anything itself."""
    pending, last = with_false_base("c", base="forked"), of_last_step(NAMES)
    for shown in (last, ()):
        parts = [part(it, pending, last) for it in "ab"]
        parts += [part("c", pending, of_last_step(NAMES, liar="d")), part("d", pending, shown)]
        assert list(evidence(parts, TERMS).liars) == ["d"]


def test_nobody_is_out_by_the_word_of_half_of_all() -> None:
    pending, last = with_false_base("c"), of_last_step(NAMES)
    parts = [part(it, pending, last if it in "ab" else ()) for it in NAMES]
    assert not evidence(parts, TERMS).left_out


@pytest.mark.parametrize("begins", [True, False], ids=["first-step", "later-step"])
def test_of_many_some_have_no_room_for_what_they_were_told(begins: bool) -> None:
    """Members that have seen the fork before they are asked pass it on, and one that has not is no
    liar. In the first step after a failure all start from what they have agreed on."""
    pending, last = with_false_base("00", MANY), of_last_step(MANY)
    for shown in (MANY[1:], ()):
        view = BEFORE if begins else NOW
        parts = [part(it, pending, last if it in shown else (), MANY, view) for it in MANY]
        assert list(evidence(parts, TERMS).left_out) == (["00"] if begins else [])


def test_who_is_told_what_cannot_be_so_has_reason_to_stop_the_step() -> None:
    """Such a member stops the step once all have said Prepared, and another member goes for it."""
    fork = with_false_base("c")
    assert [shows_contradiction(part(it, fork), plan_of(NAMES), TERMS) for it in NAMES] == [
        it != "c" for it in NAMES
    ]
    assert not shows_contradiction(part("a", fork[:3]), plan_of(NAMES), TERMS)
    assert not shows_contradiction(part("a", with_false_base("")), plan_of(NAMES), TERMS)
    of_many = part("01", with_false_base("00", MANY), names=MANY)
    assert not shows_contradiction(of_many, plan_of(MANY), TERMS), "nobody need go for it"
    norm = tuple(said(it, NAMES, norm=5.0 if it == "c" else 4.0) for it in NAMES)
    assert [shows_contradiction(part(it, norm), plan_of(NAMES), TERMS) for it in NAMES] == [
        it != "c" for it in NAMES
    ]
    absurd = (*norm[:3], said("d", NAMES, norm=-1.0))
    assert not shows_contradiction(part("a", absurd), plan_of(NAMES), TERMS)
