"""What a barred peer did is taken back once, and nobody's word or disk brings it back."""

import msgspec
import pytest

from p2p_dtfm.core.audit.roles import (
    KNOWN,
    NEW,
    WATCHED_STEPS,
)
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.consensus.attempts.chosen import Chosen, chosen_of
from p2p_dtfm.core.consensus.views.view_precedence import Side, outranks
from p2p_dtfm.core.membership.undo import agreed_epochs, undo_due
from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    PendingStep,
    PresentView,
    RetainedStep,
    SavedState,
)
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.lineage import (
    STARTS_REMEMBERED,
    Epochs,
    Lineage,
    epochs_of,
    extend,
    is_lineage,
    is_undone,
    marked,
    named_in,
    unmarked,
)
from p2p_dtfm.core.protocol.sections.audit_spec import AuditSpec
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Member, ViewId
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.going_back import restart_of
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.core.recovery.restart_point import Recovery, Undo
from tests.core.audit.parts import NAMES, PLAN, VIEW, step_of
from tests.core.audit.test_bars import (
    HONEST,
    MEMBERS,
    NOWHERE,
    all_find,
    brought_by,
    part,
    two_of,
)
from tests.core.builders import stated

LAYERS = 3
NOW = 40
TERMS = StepTerms(5, 4, 10, 10, 100, 20.0, audits=True, follow_steps=5, undo_steps=12, undo_every=6)
NEXT = ViewId(5, "cd" * 32)
PLACES = tuple(range(LAYERS))


def lineage(step: int) -> str:
    """The lineage of the run as the liar has made it."""
    return extend("", step, VIEW) if step else ""


def saved(*steps: int, layers: tuple[int, ...] = PLACES) -> tuple[SavedState, ...]:
    return tuple(SavedState(step, lineage(step), layers) for step in steps)


def at(name: str, kept: tuple[SavedState, ...], base: str = "", **changes: object) -> Contribution:
    """A member in the middle of step `NOW`."""
    base = base or lineage(NOW)
    said = part(name, step=NOW, saved=kept, pending=PendingStep(NOW, base, (), ()))
    return msgspec.structs.replace(said, lineages={NOW: base}, **changes)


def undone(parts: list[Contribution], newest: int, epochs: Epochs | None = None) -> Recovery:
    undo = Undo(("d",), newest, TERMS.undo_every)
    return restart_of(parts, LAYERS, TERMS, epochs or Epochs(), undo)


# names -------------------------------------------------------------------------------------------


def test_names_tell_the_epoch_and_pass_it_on() -> None:
    begun = marked(lineage(24), Epochs().next_one(24))
    after = extend(begun, 24, NEXT)
    assert epochs_of(begun) == epochs_of(after) == Epochs(1, (24,)) != epochs_of(lineage(24))
    assert unmarked(begun) == lineage(24) and is_lineage(after) and is_lineage("")
    assert not is_lineage("../etc") and not is_lineage("1:24:../etc")
    assert extend("", 0, VIEW) == unmarked(extend("", 0, VIEW)), "off, names are what they were"


def test_a_state_longer_than_what_a_later_epoch_began_with_was_taken_back() -> None:
    epochs = Epochs().next_one(40).next_one(24)
    first = marked(lineage(30), Epochs(1, (40,)))
    assert not is_undone(24, lineage(24), epochs) and is_undone(25, lineage(25), epochs)
    assert is_undone(30, first, epochs) and not is_undone(30, first, Epochs(1, (40,)))
    later = Epochs(2, (24, 40))
    assert is_undone(30, lineage(30), later), "the first epoch began before it"
    assert not is_undone(30, first, later), "and this one lies behind the second's beginning"
    assert named_in(24, lineage(24), epochs) == marked(lineage(24), epochs)
    assert named_in(20, lineage(20), epochs) == lineage(20)


def test_of_epochs_that_are_forgotten_nothing_counts_but_the_beginning() -> None:
    epochs = Epochs()
    for step in range(100, 100 + STARTS_REMEMBERED + 1):
        epochs = epochs.next_one(step)
    assert epochs_of(marked(lineage(9), epochs)) == epochs
    assert is_undone(1, lineage(1), epochs) and not is_undone(0, "", epochs)


def test_the_beginning_has_an_epoch_too() -> None:
    mine = Lineage()
    mine.move_to(0, marked("", Epochs().next_one(0)))
    assert epochs_of(mine.digest) == Epochs(1, (0,)) and mine.at(0) == mine.digest
    mine.move_to(7, lineage(7))
    assert mine.at(0) == ""


# when --------------------------------------------------------------------------------------------


def bar(count: int = 1, step: int = NOW, until: int = NOW + 400, reason: str = "lies") -> Bar:
    return Bar(VIEW if count else GENESIS, step, "d", count, until, reason)


def due(before: tuple[Bar, ...], *after: Bar, terms: StepTerms = TERMS) -> Undo | None:
    return undo_due(before, after, terms, Epochs())


def test_a_verdict_takes_back_so_many_steps_and_only_once() -> None:
    assert due((), bar()) == Undo(("d",), NOW - 12, 6)
    assert due((bar(),), bar()) is None, "the same verdict again"
    assert due((bar(),), bar(2, 500, 1300)) == Undo(("d",), 488, 6)
    assert due((), bar(0)) is None, "that a key is known is no verdict"
    assert due((), bar(), terms=msgspec.structs.replace(TERMS, undo_steps=0)) is None


def test_nothing_is_taken_back_from_before_it_had_a_stage() -> None:
    assert due((bar(0, 35, 36, "came"),), bar()) == Undo(("d",), 35, 6)
    assert due((bar(1, 7, 39),), bar(2)) == Undo(("d",), 39, 6), "it was barred until then"
    assert due((), bar(step=3)) == Undo(("d",), 0, 6)


def test_who_is_found_in_steps_that_are_done_again_costs_no_more_of_those_before() -> None:
    """Colluders are found one after the other. In those steps each was drawn for nothing the first
    time."""
    first, again = msgspec.structs.replace(bar(), peer_id="c"), bar(step=26)
    assert undo_due((first,), (first, again), TERMS, Epochs(1, (24,))) == Undo(("d",), 24, 6)
    assert undo_due((first,), (first, again), TERMS, Epochs(1, (30,))) == Undo(("d",), 14, 6)
    late = bar(step=60)
    assert undo_due((first,), (first, late), TERMS, Epochs(1, (24,))) == Undo(("d",), 48, 6)


RARE = msgspec.structs.replace(
    TERMS, follow_steps=50, undo_steps=228, undo_every=114, rate_millionths=20_000
)
"""The rate of audits that is advised."""


def test_of_who_is_new_fewer_steps_are_taken_back_as_more_of_its_works_are_audited() -> None:
    """The way back led to before the key was known, though the key had no stage for its first 50
    steps."""
    new = bar(0, 500, 550, NEW)
    assert due((new,), bar(step=600), terms=RARE) == Undo(("d",), 600 - 23, 114)
    assert due((new,), bar(step=560), terms=RARE) == Undo(("d",), 560 - 23, 114)
    over = 550 + WATCHED_STEPS
    assert due((new,), bar(step=over + 28), terms=RARE) == Undo(("d",), over - 20, 114)
    assert due((new,), bar(step=over + 300), terms=RARE) == Undo(("d",), over + 72, 114)
    assert due((), bar(step=600), terms=RARE) == Undo(("d",), 600 - 228, 114), "established"
    often = msgspec.structs.replace(RARE, rate_millionths=500_000, undo_steps=7)
    assert due((new,), bar(step=600), terms=often) == Undo(("d",), 593, 114)


def test_after_a_verdict_fewer_are_taken_back_as_more_is_audited() -> None:
    """A colluder is found in the steps that are done again, or a little later."""
    first = msgspec.structs.replace(bar(step=600), peer_id="c")
    begun = Epochs(1, (450,))  # of a new key: little was taken back

    def taken_back(step: int, epochs: Epochs = begun) -> int:
        undo = undo_due((first,), (first, bar(step=step)), RARE, epochs)
        assert undo is not None
        return step - undo.newest

    assert taken_back(500) == 23 == taken_back(900)
    assert taken_back(460) == 10 + 128, "ten times as much is audited since 450"
    assert taken_back(920) == 20 + 21 and taken_back(1200) == 228
    second = msgspec.structs.replace(bar(step=470), peer_id="e", view=NEXT)
    undo = undo_due((first, second), (first, second, bar(step=300)), RARE, Epochs(2, (450, 228)))
    assert undo is not None and undo.newest == 277, "the last verdict's, not the furthest one"
    assert taken_back(610, Epochs()) == 10 + 128, "nothing was taken back: since the verdict"
    assert taken_back(610, Epochs(1, (200,))) == 10 + 128, "nor by this epoch"


def test_what_the_convicted_did_before_they_had_to_wait_again_was_audited_as_anybodys() -> None:
    """The peer was established again, and had no stage when another peer was convicted, so it
    waited."""
    held = Bar(VIEW, 1000, "d", 1, 5200, "lies")
    again = Bar(NEXT, 5260, "d", 2, 6060, "lies")
    for step, taken in ((5260, 23), (5210, 10 + 128), (5202, 2 + 208)):
        undo = due((held,), msgspec.structs.replace(again, step=step), terms=RARE)
        assert undo is not None and step - undo.newest == taken


def verdict_of(peer_id: str, number: int, step: int) -> Bar:
    """The verdict with this `number`."""
    return Bar(ViewId(number, "ef" * 32), step, peer_id, 1, step + 400, "lies")


@pytest.mark.parametrize(
    ("verdicts", "starts", "step", "taken"),
    [
        ((1200, 1100), (912, 1026), 1030, 23),  # all works since 912 were audited as often
        ((1200, 1000), (1026, 912), 1030, 23),
        ((1200, 1500), (912, 1368), 1370, 23),
        ((1000, 1500), (912, 1368), 1370, 2 + 208),  # the first alarm was over at 1300
    ],
)
def test_after_several_verdicts_as_little_is_taken_back_as_after_one(
    verdicts: tuple[int, ...], starts: tuple[int, ...], step: int, taken: int
) -> None:
    """Only the last verdict's epoch counted as audited more often, though the epochs before it
    were, too."""
    known = tuple(verdict_of(f"p{n}", n, at) for n, at in enumerate(verdicts, 1))
    epochs = Epochs(len(starts), starts)
    undo = undo_due(known, (*known, bar(step=step)), RARE, epochs)
    assert undo is not None
    assert step - undo.newest == taken


def test_a_rate_that_is_nearly_none_takes_back_as_much() -> None:
    """A rate below one in two millions is zero in millionths, and nothing was taken back."""
    spec = AuditSpec(rate=1e-7, undo_steps=228)
    terms = msgspec.structs.replace(RARE, rate_millionths=spec.rate_millionths)
    assert due((), bar(step=600), terms=terms) == Undo(("d",), 600 - 228, 114)


def with_verdict(found: dict[str, dict[str, bytes]]) -> list[Contribution]:
    signed = tuple(stated(item).signed for item in step_of(HONEST, found).values())
    pending = PendingStep(7, "", signed, PLACES, counts=dict.fromkeys(NAMES, 2))
    return [part(name, pending=pending) for name in NAMES]


def chosen(parts: list[Contribution]) -> Chosen:
    return chosen_of({it.member: it for it in parts}, TERMS, (), lambda rest: 7)


def test_after_each_verdict_whoever_is_new_and_has_no_stage_waits_for_longer() -> None:
    """A peer with a stage keeps it, and keeps the step at which it was first known. So does an
    established peer. A convicted peer without a stage waits as well."""
    new = [Bar(GENESIS, 2, it, 0, 7, NEW) for it in "ax"]
    asleep, early = Bar(GENESIS, 0, "z", 0, 1, NEW), Bar(GENESIS, 0, "w", 0, 0, KNOWN)
    others = (*new, asleep, early, Bar(GENESIS, 0, "b", 0, 0, KNOWN))
    earlier = Bar(VIEW, 1, "y", 1, 2, "lies")
    joiner = part("e", step=0, present=None, held={}, lineages={})
    for bars, wait_steps in ((others, 20), ((*others, earlier), 94)):
        parts = [msgspec.structs.replace(it, bars=bars) for it in with_verdict(all_find("c"))]
        found = {it.peer_id: it for it in chosen([*parts, joiner]).bars}
        assert {it: found[it].until_step for it in "abw"} == {"a": 7, "b": 0, "w": 0}
        assert [found[it].until_step for it in "exz"] == 3 * [7 + wait_steps]
        assert found["x"].step == 2
        if bars != others:
            assert found["y"].until_step == 7 + wait_steps
    quiet = [part(name, others) for name in NAMES]
    found = {it.peer_id: it for it in chosen([*quiet, joiner]).bars}
    assert found["x"].until_step == 7 and found["e"].until_step == 7 + TERMS.follow_steps


def test_only_who_is_barred_has_work_taken_back() -> None:
    assert chosen(with_verdict(all_find("c"))).undo == Undo(("c",), 0, 6)
    in_doubt = {"a": {"c": b"0" * 32}}
    assert chosen(with_verdict(in_doubt)).undo is None
    known = [msgspec.structs.replace(it, bars=(bar(),)) for it in with_verdict({})]
    assert chosen(known).undo is None, "whoever is barred already"


@pytest.mark.parametrize(("view", "step"), NOWHERE)
def test_how_far_it_goes_back_is_not_for_who_is_barred_to_say(view: ViewId, step: int) -> None:
    """Two Prepared of step 0 sent the swarm back to the beginning, and two of a step to come sent
    it back not at all."""
    parts = with_verdict({})
    brought_by("c", parts, two_of("c", view, step))
    assert chosen(parts).undo is None
    terms = msgspec.structs.replace(TERMS, undo_steps=4, undo_every=2)
    parts = with_verdict(all_find("c"))
    brought_by("c", parts, two_of("c", view, step))
    heard = {it.member: it for it in parts}
    assert chosen_of(heard, terms, (), lambda rest: 7).undo == Undo(("c",), 3, 2)


def test_a_few_begin_no_epoch_by_saying_so() -> None:
    high = marked(lineage(NOW), Epochs(9, (0,)))
    told = [at(name, (), high if name in "cd" else "") for name in NAMES]
    assert agreed_epochs(told) == Epochs()
    told = [at(name, (), high if name in "bcd" else "") for name in NAMES]
    assert agreed_epochs(told) == Epochs(9, (0,))
    out = [msgspec.structs.replace(it, present=None) for it in told[2:]]
    assert agreed_epochs([*told[:1], *out]) == Epochs(), "newcomers have no voice"


# where -------------------------------------------------------------------------------------------


def test_it_goes_back_to_the_newest_copy_that_is_old_enough() -> None:
    parts = [at(name, saved(18, 24, 30, 36)) for name in "abc"]
    found = undone(parts, NOW - 12)
    assert found.target == Target(24, marked(lineage(24), Epochs(1, (24,))))
    assert found.undo is not None and found.held == {it.member: PLACES for it in parts}


def test_a_copy_that_is_not_whole_is_none_and_parts_of_several_make_one() -> None:
    torn = [at(name, saved(18) + saved(24, layers=(0, 1))) for name in "abc"]
    found = undone(torn, 26)
    assert found.target is not None and found.target.step != 24
    shared = [at(name, saved(24, layers=(place,))) for place, name in enumerate("abc")]
    found = undone(shared, 26)
    assert found.target is not None and found.target.step == 24 and not found.lost_layers


def test_the_beginning_can_always_be_made_again_where_it_is_due() -> None:
    found = undone([at(name, saved(6, 12)) for name in "abc"], 5)
    assert found.target == Target(0, marked("", Epochs(1, (0,)))) and not found.lost_layers


def test_where_nothing_old_enough_is_kept_it_is_the_oldest_that_there_is() -> None:
    """A late confession must not cost more than was said, either: 6 is too far back."""
    found = undone([at(name, saved(6, 30, 36)) for name in "abc"], 28)
    assert found.target is not None and found.target.step == 30
    assert undone([at(name, ()) for name in "abc"], 28).target == Target(NOW, lineage(NOW))


def test_one_that_invents_a_copy_leads_nobody_there() -> None:
    parts = [at(name, saved(24)) for name in "ab"]
    parts.append(at("c", (SavedState(27, "f" * 64, PLACES), *saved(24))))
    found = undone(parts, 28)
    assert found.target is not None and found.target.step == 24


def test_a_second_undo_begins_a_second_epoch() -> None:
    epochs = Epochs(1, (24,))
    base, kept = marked(lineage(NOW), epochs), marked(lineage(36), epochs)
    parts = [at(name, (SavedState(36, kept, PLACES), *saved(24)), base) for name in "abc"]
    found = undone(parts, 38, epochs)
    assert found.target == Target(36, marked(lineage(36), Epochs(2, (24, 36))))


def test_who_has_the_state_in_memory_keeps_it_whatever_its_name() -> None:
    evidence = RecoveryEvidence()
    evidence.lineage.move_to(24, lineage(24))
    evidence.held = {0: 24, 1: 30}
    me = Member("a", 1)
    target = Target(24, marked(lineage(24), Epochs(1, (24,))))
    restart = evidence.restart(me, Recovery(target, held={me: (0, 1)}))
    assert restart.discard == (1,) and restart.load == (1,)
    assert evidence.lineage.digest == target.lineage


# and stays so ------------------------------------------------------------------------------------

EPOCHS = Epochs(1, (24,))
BACK = marked(lineage(24), EPOCHS)


def back(name: str, **changes: object) -> Contribution:
    """A member that has gone back to 24, and stands in step 30 again."""
    base = extend(BACK, 29, NEXT)
    here = PresentView(NEXT, tuple(MEMBERS[it] for it in "abc"), PLAN)
    said = at(name, (), base, step=30, present=here, held=dict.fromkeys(PLACES, 30))
    pending = PendingStep(30, base, (), ())
    return msgspec.structs.replace(said, lineages={30: base}, pending=pending, **changes)


@pytest.mark.parametrize("is_member", [True, False])
def test_a_home_that_was_away_does_not_bring_it_back(is_member: bool) -> None:
    """Without the epoch the home would bring it back, since its history is longer, and whole."""
    away = at("d", saved(24, 36, NOW))
    outcome = StepOutcome(NOW - 1, 1.0, 0.0, 4, None, None)
    retained = RetainedStep(VIEW, NOW - 1, lineage(NOW - 1), outcome, PLACES)
    away = msgspec.structs.replace(away, retained=retained, held=dict.fromkeys(PLACES, NOW))
    if not is_member:
        away = msgspec.structs.replace(away, present=None, pending=None)
    parts = [back("a"), back("b"), back("c"), away]
    assert agreed_epochs(parts) == EPOCHS
    found = restart_of(parts, LAYERS, TERMS, EPOCHS, None)
    assert found.target == Target(30, extend(BACK, 29, NEXT))
    assert MEMBERS["d"] not in {m for m, layers in found.held.items() if layers}


def test_after_a_restart_of_all_what_was_taken_back_counts_for_nothing() -> None:
    homes = [at(name, (SavedState(24, BACK, PLACES),), BACK) for name in "abc"]
    homes = [
        msgspec.structs.replace(it, present=None, pending=None, held={}, lineages={}, step=0)
        for it in homes
    ]
    away = msgspec.structs.replace(homes[0], member=MEMBERS["d"], saved=saved(24, 36))
    parts = [*homes, away]
    assert agreed_epochs(parts) == EPOCHS
    found = restart_of(parts, LAYERS, TERMS, agreed_epochs(parts), None)
    assert found.target == Target(24, BACK)
    assert len(found.held) == 4, "what it has of the state that they went back to is the same"
    poisoned = restart_of(parts, LAYERS, TERMS, Epochs(), None)
    assert poisoned.target is not None and poisoned.target.step == 36, "or this could not fail"


def test_parts_of_a_split_swarm_go_by_the_epoch_before_the_length() -> None:
    here = frozenset("ab")
    old = Side(True, here, 400, ViewId(8, "f"))
    new = Side(True, frozenset("cd"), 30, ViewId(7, "0"), epoch=1)
    assert outranks(new, old) and not outranks(old, new)
    assert outranks(Side(True, frozenset("abe"), 400, old.view), new), "who stands behind it first"
