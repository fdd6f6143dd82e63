"""A member that understates how far it has come sends nobody back, where few or no stage-holders
can speak against it. A member that has come further than others sends nobody back either."""

import msgspec
import pytest

from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    PendingStep,
    PresentView,
    RetainedStep,
    SavedState,
)
from p2p_dtfm.core.messages.prepared import Prepared, StepOutcome
from p2p_dtfm.core.protocol.lineage import extend
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.believed_claims import BelievedClaims
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.restart_point import recover
from tests.core.builders import stated

VIEW, BEFORE = ViewId(4, "view"), ViewId(2, "before")
MEMBERS = A, B, C, D, E = [Member(name, 1) for name in "abcde"]
STEP = 8
CUT = SavedState(5, "as of step 5", (0, 1))


def present_of(holders: str, view: ViewId = VIEW) -> PresentView:
    """A view in which each holder has one layer, or the only one has both."""
    ends = (1, 2) if len(holders) == 2 else (2,)
    firsts = (0, *ends)
    stages = tuple(Stage(it, firsts[n], ends[n], 1) for n, it in enumerate(holders))
    return PresentView(view, tuple(MEMBERS), Plan((Pipeline(stages, 0, 4),), (), 1))


def said(holders: str, step: int = STEP - 1) -> tuple[Signed, ...]:
    made = (Prepared(VIEW, step, it, {}, 0.0, 2, 0.0, 0, None, base="base") for it in holders)
    return tuple(stated(it).signed for it in made)


def part(member: Member, present: PresentView, step: int, **changes: object) -> Contribution:
    contribution = Contribution(
        member=member,
        number=5,
        record=Signed(member.peer_id, "record", b"", b""),
        present=present,
        step=step,
        held={},
        joiners=(),
        pending=PendingStep(step, "now", (), ()),
    )
    return msgspec.structs.replace(contribution, **changes)


def spare(member: Member, holders: str, step: int = STEP, **changes: object) -> Contribution:
    """A spare's contribution with all Prepared of the step that it has committed, as few holders'
    Prepared travel."""
    last = RetainedStep(VIEW, step - 1, "base", None, (), said(holders, step - 1))
    return part(member, present_of(holders), step, retained=last, **changes)


@pytest.mark.parametrize("view", [VIEW, BEFORE], ids=["here", "elsewhere"])
def test_a_spare_that_understates_its_step_sends_nobody_back(view: ViewId) -> None:
    """The only stage-holder has died. It may be back, or there is a copy to go back to."""
    liar = part(B, present_of("a", view), 0)
    kept = {"cuts": (CUT,), "saved": (CUT,)}
    two = [liar, spare(C, "a", **kept)]
    assert BelievedClaims(two).furthest() == STEP
    found = recover(two, 2)
    assert found.target is None and found.lost_layers == (0, 1)
    three = [*two, spare(D, "a", **kept)]
    assert BelievedClaims(three).furthest() == STEP
    assert recover(three, 2).target == Target(5, CUT.lineage)
    accepted = [msgspec.structs.replace(it, accepts_loss=True) for it in three]
    assert recover(accepted, 2).target == Target(5, CUT.lineage)


def test_honest_spares_at_unlike_steps_do_not_lower_the_floor() -> None:
    assert BelievedClaims([spare(B, "a", 3), spare(C, "a")]).furthest() == STEP


def test_what_one_alone_says_to_have_come_to_is_not_shown_by_less() -> None:
    """Prepared of some view in which the member alone says it is show it no better."""
    fellows = [spare(it, "a") for it in (B, C)]
    far = msgspec.structs.replace(spare(D, "a"), step=60)
    assert BelievedClaims([*fellows, far]).furthest() == STEP
    one = Prepared(BEFORE, 59, "a", {}, 0.0, 2, 0.0, 0, None, base="base")
    last = RetainedStep(BEFORE, 59, "base", None, (), (stated(one).signed,))
    elsewhere = part(D, present_of("a", BEFORE), 60, retained=last)
    assert BelievedClaims([*fellows, elsewhere]).furthest() == STEP


@pytest.mark.parametrize("accepts_loss", [False, True])
def test_a_holder_that_understates_its_step_has_signed_how_far_it_was(accepts_loss: bool) -> None:
    """The other holder has died. The copy to which all could go back counted for nothing."""
    liar = part(B, present_of("ab"), 0, accepts_loss=accepts_loss)
    signed = PendingStep(STEP - 1, "base", said("b"), ())
    honest = [
        part(it, present_of("ab"), STEP - 1, cuts=(CUT,), pending=signed, accepts_loss=accepts_loss)
        for it in (C, D, E)
    ]
    assert recover([liar, *honest], 2).target == Target(5, CUT.lineage)
    earlier = PendingStep(STEP - 1, "base", said("b", 4), ())
    shows_less = [msgspec.structs.replace(it, pending=earlier) for it in honest]
    claims = BelievedClaims([liar, *shows_less])
    assert not claims.may_have(shows_less[0], 5, CUT.lineage), "who prepares step 4 is at version 4"


def test_who_has_gone_further_does_not_deny_the_copies_of_its_layers() -> None:
    """Nobody else can go as far. A guardian keeps the state to which the outcome led that most tell
    of."""
    outcome, present = StepOutcome(7, 1.0, 0.0, 4, None, None), present_of("ab")
    after = Target(8, extend("base", 7, VIEW, outcome.digest))
    told = RetainedStep(VIEW, 7, "base", outcome, ())

    def at(member: Member, layer: int, step: int, lineage: str) -> Contribution:
        held = {"held": {layer: step}, "lineages": {step: lineage}}
        return part(member, present, step, retained=told if step == 8 else None, **held)

    others = [at(B, 1, 8, after.lineage), at(C, 0, 8, after.lineage)]
    further = at(A, 0, 9, "later")
    found = recover([further, *others], 2)
    assert found.target == after and found.held[C] == (0,)
    elsewhere = msgspec.structs.replace(at(A, 0, 8, "elsewhere"), retained=None)
    assert recover([elsewhere, *others], 2).lost_layers == (0,), "it has not taken that step"
