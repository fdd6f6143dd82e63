"""Colluders of a barred peer do not keep what it did: neither by a word in a view that only some
have taken over, nor by a verdict in a planned view, which goes back to nothing."""

import msgspec
import pytest

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.chosen import Chosen, chosen_of
from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    PendingStep,
    PresentView,
    RetainedStep,
    SavedState,
)
from p2p_dtfm.core.protocol.lineage import Epochs, extend, marked
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Bar, Member, ViewId
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.going_back import restart_of
from tests.core.audit.parts import VIEW
from tests.core.audit.test_bars import brought_by, two_of

NAMES = "abcdefgh"
LIAR, COLLUDER = "c", "h"
NOW, KEPT, LAYERS = 40, 24, range(3)
TERMS = StepTerms(5, 4, 10, 10, 100, 20.0, audits=True, follow_steps=5, undo_steps=12, undo_every=6)
PLAN = Plan(tuple(Pipeline((Stage(n, 0, 3, 1),), 2 * i, 2) for i, n in enumerate(NAMES)), (), 1)
OTHERS = Plan(tuple(it for it in PLAN.pipelines if it.stages[0].peer_id != LIAR), (), 1)
MEMBERS = {name: Member(name, 1) for name in NAMES}
STAY = tuple(member for name, member in MEMBERS.items() if name != LIAR)
BEFORE = PresentView(VIEW, tuple(MEMBERS.values()), PLAN)
AFTER = PresentView(ViewId(5, "cd" * 32), STAY, OTHERS)
BAR = Bar(VIEW, NOW, LIAR, 1, NOW + 400, "lies")
EPOCH = Epochs(1, (KEPT,))


def lineage(step: int) -> str:
    """The lineage of the run as the liar has made it."""
    return extend("", step, VIEW)


def at(name: str, step: int, base: str, present: PresentView, *bars: Bar) -> Contribution:
    """A member in the middle of `step`, with the kept state on its disk."""
    return Contribution(
        member=MEMBERS[name],
        number=7,
        record=Signed(name, "record", b"", b""),
        present=present,
        step=step,
        held=dict.fromkeys(LAYERS, step),
        joiners=(),
        lineages={step: base},
        saved=(SavedState(KEPT, lineage(KEPT), tuple(LAYERS)),),
        pending=PendingStep(step, base, (), ()),
        bars=bars,
    )


def judged(colluder: Contribution) -> tuple[list[Contribution], Chosen]:
    """Three of six honest members have taken over the view that takes the liar's steps back. The
    others show what convicts it, and the colluder has all agree anew."""
    went_back = [at(it, KEPT, marked(lineage(KEPT), EPOCH), AFTER, BAR) for it in "abd"]
    behind = [at(it, NOW, lineage(NOW), BEFORE) for it in "efg"]
    for name in "efg":
        brought_by(name, behind, two_of(LIAR, VIEW, NOW))
    parts = [*went_back, *behind, colluder]
    return parts, chosen_of({it.member: it for it in parts}, TERMS, (), lambda rest: NOW)


SAYS = {
    "nothing": at(COLLUDER, NOW, lineage(NOW), BEFORE),
    "the bar alone": at(COLLUDER, NOW, lineage(NOW), BEFORE, BAR),
    "the epoch alone": at(COLLUDER, KEPT, marked(lineage(KEPT), EPOCH), AFTER),
    "both": at(COLLUDER, KEPT, marked(lineage(KEPT), EPOCH), AFTER, BAR),
}


@pytest.mark.parametrize("said", SAYS)
def test_what_a_barred_peer_did_is_taken_back_whatever_its_colluder_says(said: str) -> None:
    """It named the bar, and no epoch. So the bar was agreed on, and nobody went back for it any
    more: what the liar had done stayed for good."""
    parts, found = judged(SAYS[said])
    assert [bar.peer_id for bar in found.bars if bar.count] == [LIAR]
    restart = restart_of(parts, len(LAYERS), TERMS, found.epochs, found.undo)
    assert restart.target == Target(KEPT, marked(lineage(KEPT), EPOCH))


def test_a_copy_is_the_same_under_its_new_name() -> None:
    """Who has gone back has given the kept state its new name on its disk. Under neither name did
    most tell of it, and a colluder's forged copy, which was newer, became the model of all."""
    forged = SavedState(KEPT + 2, "f" * 64, tuple(LAYERS))
    parts, _ = judged(msgspec.structs.replace(SAYS["nothing"], saved=(forged,)))
    kept = SavedState(KEPT, marked(lineage(KEPT), EPOCH), tuple(LAYERS))
    parts = [
        msgspec.structs.replace(it, saved=(kept,)) if it.present == AFTER else it for it in parts
    ]
    found = chosen_of({it.member: it for it in parts}, TERMS, (), lambda rest: NOW)
    restart = restart_of(parts, len(LAYERS), TERMS, found.epochs, found.undo)
    assert restart.target == Target(KEPT, marked(lineage(KEPT), EPOCH))
    have_all = {it.peer_id for it, layers in restart.held.items() if layers == tuple(LAYERS)}
    assert have_all == set("abdefg")


def test_a_planned_view_convicts_nobody_as_it_takes_nothing_back() -> None:
    """A liar that was in no step under way brought two Prepared of its own along. It was barred,
    and what it had done before was never taken back."""
    attempt = Attempt(MEMBERS["a"], 6, True, VIEW, len(LAYERS), TERMS)
    last = RetainedStep(VIEW, NOW - 1, lineage(NOW - 1), None, ())
    parts = [at(name, NOW, lineage(NOW), BEFORE) for name in NAMES]
    parts = [msgspec.structs.replace(it, pending=None, retained=last) for it in parts]
    brought_by(LIAR, parts, two_of(LIAR, VIEW, NOW - 1))
    for part in parts:
        attempt.add(Signed(part.member.peer_id, "contribution", b"", b""), part)
    assert not [bar for bar in attempt.judged.bars if bar.count]
    assert MEMBERS[LIAR] in attempt.participants, "or it would be out without a bar"
