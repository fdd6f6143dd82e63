"""What members said in steps that are over convicts nobody by what colluders say of these steps
now. Nor does what few have said so far of the step under way. A few pass on what an honest member
signed in a step committed long ago, without what others said there. They sign something else for it
themselves. They were most of those that anything was heard of, and had all honest members out, each
by another step."""

import msgspec
import pytest

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.messages.agreement_messages import Contribution, PendingStep, PresentView
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.contradictions import evidence
from tests.core.builders import stated

NAMES, COLLUDERS = "abcdefgh", "gh"
HONEST = NAMES[:6]
PLAN = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), i, 1) for i, n in enumerate(NAMES)), (), 1)
SUMS = tuple(bytes([n]) * 16 for n in range(8))
TERMS = StepTerms(5, 4, 10, 10, 100, 20.0)
NOW, BEFORE = ViewId(3, "ab" * 32), ViewId(2, "cd" * 32)
STEP = 30
COUNTS = dict.fromkeys(NAMES, 1)


def said(peer: str, step: int, view: ViewId = NOW, norm: float = 4.0) -> Signed:
    tokens = TERMS.microbatch_tokens
    held_out = TERMS.held_out_tokens(step, PLAN, peer)
    made = Prepared(view, step, peer, {0: norm}, 9.0, tokens, 0.0, held_out, None, "base")
    states = dict.fromkeys(range(3), b"s" * 16) if TERMS.tells_states(step) else {}
    made = msgspec.structs.replace(made, sums={0: SUMS}, states=states)
    return stated(made).signed


def part(
    name: str,
    passed_on: tuple[Signed, ...],
    view: ViewId = NOW,
    step: int = STEP,
    counts: dict[str, int] = COUNTS,
) -> Contribution:
    return Contribution(
        member=Member(name, 1),
        number=5,
        record=Signed(name, "record", b"", b""),
        present=PresentView(view, tuple(Member(n, 1) for n in NAMES), PLAN),
        step=step,
        held=dict.fromkeys(range(3), step),
        joiners=(),
        lineages={step: "base"},
        pending=PendingStep(step, "base", passed_on, (0, 1, 2), counts=counts),
    )


def honest_parts() -> list[Contribution]:
    return [part(name, tuple(said(it, STEP) for it in HONEST)) for name in HONEST]


@pytest.mark.parametrize(
    ("view", "step"), [(NOW, STEP), (NOW, 20), (BEFORE, 20)], ids=["now", "behind", "another-view"]
)
def test_colluders_frame_nobody_by_what_most_were_not_asked_of(view: ViewId, step: int) -> None:
    """Each honest member is accused by a step of its own, in which only the colluders are heard
    beside it."""
    passed_on = []
    for number, victim in enumerate(HONEST):
        of = 11 + number
        passed_on += [said(victim, of, view), *(said(it, of, view, norm=9.0) for it in COLLUDERS)]
    colluders = [part(it, tuple(passed_on), view, step) for it in COLLUDERS]
    found = evidence([*honest_parts(), *colluders], TERMS)
    assert not set(found.left_out) & set(HONEST), found.liars
    assert not any(set(pair) & set(HONEST) for pair in found.doubts)


def test_nobody_has_others_counted_by_a_view_in_which_it_is_alone() -> None:
    passed_on = tuple(said(it, 20, BEFORE) for it in HONEST)
    false_counts = dict.fromkeys(NAMES, 2)
    liar = part("h", passed_on, BEFORE, 20, false_counts)
    found = evidence([*honest_parts(), liar], TERMS)
    assert not found.liars


def test_in_the_step_under_way_and_the_last_one_the_odd_one_is_out() -> None:
    """Most members are there, whether they have committed the step or are about to."""
    for step in (STEP, STEP - 1):
        true = [said(it, step) for it in NAMES[:7]]
        passed_on = (*true, said("h", step, norm=9.0))
        parts = [part(it, passed_on, step=STEP) for it in NAMES[:7]]
        found = evidence([*parts, part("h", passed_on, step=step)], TERMS)
        assert set(found.liars) == {"h"}, step


def test_who_has_signed_two_things_of_a_step_that_is_over_is_out_in_any_case() -> None:
    passed_on = (said("h", 20), said("h", 20, norm=9.0))
    parts = [part(it, passed_on) for it in HONEST]
    assert set(evidence(parts, TERMS).liars) == {"h"}


def test_where_most_pass_nothing_on_of_a_step_a_few_convict_nobody_by_it() -> None:
    """This is so for the last step where many have a stage, and for all steps where a view is
    planned."""
    passed_on = (said("a", STEP - 1), *(said(it, STEP - 1, norm=9.0) for it in COLLUDERS))
    parts = [part(it, ()) for it in HONEST]
    found = evidence([*parts, *(part(it, passed_on) for it in COLLUDERS)], TERMS)
    assert not found.liars and not found.doubts


@pytest.mark.parametrize("spoken", ["a", "ab", "abc"])
def test_who_speaks_first_in_the_step_under_way_is_not_the_odd_one_among_colluders(
    spoken: str,
) -> None:
    """A colluder keeps its sums from all others, says what is not so, and has the step stopped."""
    passed_on = (
        *(said(it, STEP) for it in spoken),
        *(said(it, STEP, norm=9.0) for it in COLLUDERS),
    )
    found = evidence([part(it, passed_on) for it in NAMES], TERMS)
    assert not set(found.left_out) & set(HONEST), found.told()
    assert not any(set(pair) & set(HONEST) for pair in found.doubts)
    # the peer that more than half of all contradict is out, whoever is missing
    passed_on = (*(said(it, STEP) for it in HONEST[:5]), said("h", STEP, norm=9.0))
    assert set(evidence([part(it, passed_on) for it in NAMES], TERMS).liars) == {"h"}
