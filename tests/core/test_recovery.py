"""From contributions to the state that the next view starts from."""

import time

import msgspec
import pytest

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.cost_model.guardians import guarded_layers, unguarded_layers
from p2p_dtfm.core.membership.accusers import Accusers
from p2p_dtfm.core.membership.eligibility import (
    Pair,
    earlier_doubts,
    known_accusers,
    mutually_reachable,
    unanswered,
    universe,
)
from p2p_dtfm.core.messages.agreement_messages import (
    Accusation,
    Contribution,
    PendingStep,
    PresentView,
    RetainedStep,
    SavedState,
)
from p2p_dtfm.core.messages.prepared import Prepared, StepOutcome
from p2p_dtfm.core.protocol.lineage import Epochs, Lineage, extend
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, Snapshot, ViewId, sorted_records
from p2p_dtfm.core.recovery.believed_claims import BelievedClaims
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.furthest_step import NOWHERE, FurthestStep
from p2p_dtfm.core.recovery.going_back import restart_of
from p2p_dtfm.core.recovery.receipts import GIVEN_UP_LIMIT, Receipts
from p2p_dtfm.core.recovery.restart_point import Undo, recover
from tests.core.builders import WORKLOAD, device, record, stated

VIEW = ViewId(3, "view")
TERMS = StepTerms(1, 1, 10, 10, 100, 20.0)
BASE = "base of step 7"
A, B, C = Member("a", 1), Member("b", 1), Member("c", 1)
PLAN = Plan((Pipeline((Stage("a", 0, 1, 1), Stage("b", 1, 2, 1)), 0, 4),), ("c",), 1)
PRESENT = PresentView(VIEW, (A, B, C), PLAN)
OUTCOME = StepOutcome(7, 1.0, 0.0, 4, None, None)
"""The outcome of what `prepared` says of all peers."""
AFTER = extend(BASE, 7, VIEW, OUTCOME.digest)


def prepared(peer_id: str) -> Prepared:
    norms = {0 if peer_id == "a" else 1: 0.5}
    return Prepared(VIEW, 7, peer_id, norms, 0.0, 2, 0.0, 0, None, base=BASE)


def signed(peers: str) -> tuple[Signed, ...]:
    return tuple(stated(prepared(peer)).signed for peer in peers)


def part(member: Member, held: dict[int, int], said: str = "", **changes: object) -> Contribution:
    digests = {7: BASE, 8: AFTER}
    contribution = Contribution(
        member=member,
        number=5,
        record=Signed(member.peer_id, "record", b"", b""),
        present=PRESENT,
        step=max(held.values(), default=7),
        held=held,
        joiners=(),
        lineages={version: digests[version] for version in held.values()},
        pending=PendingStep(
            7, BASE, tuple(stated(prepared(p)).signed for p in said), tuple(sorted(held))
        ),
    )
    return msgspec.structs.replace(contribution, **changes)


def test_all_prepared_together_roll_the_step_forward() -> None:
    result = recover([part(A, {0: 7}, "a"), part(B, {1: 7}, "b")], 2)
    assert result.target == Target(8, AFTER)
    assert result.outcome is not None and result.outcome.token_count == 4
    assert result.held == {A: (0,), B: (1,)}


def test_a_missing_prepared_discards_the_step() -> None:
    result = recover([part(A, {0: 7}, "a"), part(B, {1: 7}, "a")], 2)
    assert result.target == Target(7, BASE) and result.outcome is None


def test_who_committed_brings_the_outcome() -> None:
    retained = RetainedStep(VIEW, 7, BASE, OUTCOME, (0,), signed("ab"))
    ahead = part(A, {0: 8}, retained=retained, pending=None)
    result = recover([ahead, part(B, {1: 7}, "b")], 2)
    assert result.target == Target(8, AFTER) and result.outcome == OUTCOME
    assert set(result.prepared) == set(signed("ab")), "whoever goes on from there can show it, too"


def test_without_its_gradient_a_layer_does_not_roll() -> None:
    bare = PendingStep(7, BASE, (stated(prepared("b")).signed,), ())
    result = recover([part(A, {0: 7}, "a"), part(B, {1: 7}, pending=bare)], 2)
    assert result.target == Target(7, BASE)


def test_a_guardian_stands_in_for_the_dead_holder() -> None:
    result = recover([part(A, {0: 7}, "ab"), part(C, {1: 7}, "a")], 2)
    assert result.target == Target(8, AFTER) and result.held[C] == (1,)


def test_lost_layers_are_waited_for_and_then_given_up() -> None:
    saved = SavedState(3, "old", (0, 1))
    alone = part(A, {0: 7}, "a", saved=(saved,))
    assert recover([alone], 2).lost_layers == (1,)
    gives_up = msgspec.structs.replace(alone, accepts_loss=True)
    assert recover([gives_up], 2).target == Target(3, "old")
    nothing = msgspec.structs.replace(gives_up, saved=())
    assert recover([nothing], 2).target == Target(0, "")


def test_what_lies_on_disks_counts_at_once_where_it_repeats_nothing() -> None:
    """A checkpoint was made of the step that was committed last, and layer 1 is nowhere else."""
    saved = SavedState(7, BASE, (1,))
    assert recover([part(A, {0: 7}, saved=(saved,))], 2).target == Target(7, BASE)


def test_what_lies_on_disks_counts_at_once_where_so_much_may_be_repeated() -> None:
    """Guardians lagged, and their first copy was not there yet. A minute went by though a
    checkpoint of four steps before lay on a disk."""
    saved = SavedState(3, "old", (0, 1))
    alone = part(A, {0: 7}, "a", saved=(saved,))
    for may_repeat, target in ((3, None), (4, Target(3, "old"))):
        told = msgspec.structs.replace(alone, may_repeat=may_repeat)
        assert recover([told], 2).target == target
    members = [alone, part(C, {}, step=7), part(Member("d", 1), {}, step=7)]
    for count in (1, 2):
        said = [msgspec.structs.replace(it, may_repeat=99) for it in members[:count]]
        found = recover([*said, *members[count:]], 2).target
        assert found == (Target(3, "old") if count == 2 else None), "as most say"


def test_those_that_come_back_together_go_on_from_the_newest_that_their_disks_make_up() -> None:
    """Nobody is in a view. One peer has loaded an old checkpoint, which alone is whole at one
    place."""
    old, halves = SavedState(3, "old", (0, 1)), [SavedState(7, BASE, (n,)) for n in (0, 1)]
    first = part(A, {}, step=3, lineages={3: "old"}, present=None, pending=None)
    first = msgspec.structs.replace(first, held={0: 3, 1: 3}, saved=(halves[0], old))
    other = part(B, {}, step=0, saved=(halves[1],), present=None, pending=None)
    assert recover([first], 2).target == Target(3, "old")
    together = recover([first, other], 2)
    assert together.target == Target(7, BASE) and together.held == {A: (0,), B: (1,)}


def test_a_foreign_lineage_of_the_same_length_does_not_count() -> None:
    foreign = part(B, {1: 7}, lineages={7: "foreign"}, present=None, pending=None)
    assert recover([part(A, {0: 7}), foreign], 2).lost_layers != ()


def test_lineage_forgets_a_fork() -> None:
    lineage = Lineage()
    for step in range(3):
        lineage.committed(step, VIEW)
    fork = lineage.at(2)
    assert fork is not None
    lineage.move_to(2, fork)
    assert lineage.at(3) is None and lineage.at(1) is not None
    lineage.move_to(5, "elsewhere")
    assert lineage.at(2) is None and lineage.digest == "elsewhere" and lineage.at(0) == ""


def test_who_must_answer() -> None:
    newer = Member("b", 2)
    named = universe({A: part(A, {0: 7}, joiners=(newer,))})
    assert named == {A, newer, C}
    assert unanswered(named, [A], set(), set()) == {newer, C}
    assert unanswered(named, [A], {C}, {Accusation(A, newer)}) == set()
    both = unanswered({A, B, C}, [A, B], set(), {Accusation(A, C)})
    assert both == {C}, "one link in doubt is not a death"


def test_after_a_failure_of_a_view_that_trains_nobody_names_newcomers() -> None:
    invented = (Member("nobody", 1),)
    failed = {A: part(A, {0: 7}, joiners=invented)}
    assert universe(failed, planned=True) == {A, B, C, *invented}
    assert universe(failed, planned=False) == {A, B, C}
    waits = msgspec.structs.replace(PRESENT, plan=None)
    without_plan = {A: part(A, {0: 7}, joiners=invented, present=waits)}
    assert universe(without_plan, planned=False) == {A, B, C, *invented}


def test_a_cut_link_costs_the_one_that_is_needed_least() -> None:
    parts = {A: part(A, {0: 7}), B: part(B, {1: 7}), C: part(C, {0: 7})}

    def reached(rest: list[Contribution]) -> int:
        target = recover(rest, 2).target
        return -1 if target is None else target.step

    assert mutually_reachable(parts, {Accusation(B, C)}, reached) == (A, B)
    assert mutually_reachable(parts, {Accusation(A, B), Accusation(C, B)}, reached) == (A, C)
    assert mutually_reachable(parts, set(), reached) == (A, B, C)


def test_who_accuses_again_and_again_goes_first_by_the_word_of_most_members() -> None:
    def going(namers: str) -> tuple[Member, ...]:
        parts = {
            member: part(member, {0: 7, 1: 7}, accusers=("a",) if member.peer_id in namers else ())
            for member in (A, B, C)
        }
        return mutually_reachable(parts, {Accusation(A, C)}, lambda rest: 0)

    assert going("b") == (A, B), "one member names whom it likes"
    assert going("bc") == (B, C)


def test_two_colluders_that_have_one_after_the_other_in_doubt_do_not_both_stay() -> None:
    """Each time the honest peer has a link in doubt to both colluders, and each colluder has
    one."""
    members = A, B, C, D, E = [Member(name, 1) for name in "abcde"]
    there = msgspec.structs.replace(PRESENT, members=tuple(members))

    def staying(pairs: set[Accusation], named: tuple[Pair, ...], by: str) -> tuple[Member, ...]:
        parts = {
            it: part(it, {0: 7}, doubted=named if it.peer_id in by else (), present=there)
            for it in members
        }
        return mutually_reachable(parts, pairs, lambda rest: 0)

    with_c = {Accusation(A, C), Accusation(B, C)}
    assert staying(with_c, (), "cde") == (A, B, D, E), "nobody knows better yet"
    seen = Accusers()
    seen.heed_doubts([("a", "c"), ("b", "c")], 0)
    seen.heed_doubts([("a", "c")], 0)  # however often it is said, it is no second doubt
    named = seen.doubted(1)
    assert named == (("a", "c"), ("b", "c"))
    with_d = {Accusation(A, D), Accusation(B, D)}
    assert staying(with_d, named, "cde") == (C, D, E)
    assert staying(with_d, named, "ab") == (A, B, C, E), "not by the word of the few"
    seen.heed_doubts([("a", "d"), ("b", "d"), ("a", "e"), ("b", "e")], 2)
    assert staying(with_c, seen.doubted(4), "cde") == (C, D, E), "nor is the same one out again"
    assert seen.doubted(600_000_000_002) == (), "forgotten"
    heard = Accusers()
    parts = {it: part(it, {0: 7}) for it in members}
    heard.heed(1, {Accusation(A, C), Accusation(B, C)}, parts, D, 0)
    assert heard.doubted(1) == named, "so have two that say that they do not hear it"


def test_several_colluders_are_in_doubt_with_all_that_they_accused_however_often() -> None:
    """Three of ten accuse two at once. They are then in doubt with two each, and not only once."""
    names = "abcdefghij"
    members = [Member(name, 1) for name in names]
    there = msgspec.structs.replace(PRESENT, members=tuple(members))
    seen = Accusers()
    seen.heed_doubts([(liar, victim) for liar in "abc" for victim in "de"], 0)
    parts = {it: part(it, {0: 7}, doubted=seen.doubted(1), present=there) for it in members}
    next_one = {Accusation(Member(liar, 1), Member("f", 1)) for liar in "abc"}
    staying = mutually_reachable(parts, next_one, lambda rest: 0)
    assert [it.peer_id for it in staying] == [*"defghij"]
    for _ in range(9):  # one liar that gives itself up for its colluders
        seen.heed_doubts([("a", victim) for victim in names[1:]], 2)
    parts = {it: part(it, {0: 7}, doubted=seen.doubted(3), present=there) for it in members}
    staying = mutually_reachable(parts, {Accusation(members[1], members[9])}, lambda rest: 0)
    assert members[9] in staying and members[1] not in staying


def test_nobody_is_in_doubt_by_the_word_of_a_newcomer() -> None:
    """Newcomers cost only keys. Otherwise all members but the liar would be in doubt, and then go
    one by one."""
    x = Member("x", 1)
    parts = {it: part(it, {0: 7}) for it in (A, B, C)}
    parts[x] = msgspec.structs.replace(parts[C], member=x, present=None)
    seen = Accusers()
    for number in (2, 4):
        seen.heed(number, {Accusation(x, A), Accusation(B, x), Accusation(x, x)}, parts, C, 0)
    assert seen.doubted(1) == ()
    assert seen.named(1) == ("b",), "who accuses newcomers in vain is known for that"


def test_who_has_been_left_out_since_has_no_word_about_members_in_doubt() -> None:
    """Their keys were members once, in a view in which one member says it still is."""
    older = msgspec.structs.replace(PRESENT, view=ViewId(1, "before"))
    parts = {it: part(it, {0: 7}, doubted=(("a", "b"),), accusers=("a",)) for it in (A, B)}
    parts[C] = part(C, {0: 7})
    for name in "xyz":
        once = Member(name, 1)
        doubted, accusers = (("a", "c"),), ("c",)
        parts[once] = part(once, {0: 7}, doubted=doubted, accusers=accusers, present=older)
    assert earlier_doubts(parts.values()) == {("a", "b")}
    assert known_accusers(parts.values()) == {"a"}


def test_who_is_let_in_says_what_most_members_say_of_those_in_doubt() -> None:
    both, other = ("a", "b"), ("a", "c")
    parts = [part(it, {0: 7}, doubted=(both,)) for it in (A, B)]
    parts.append(part(C, {0: 7}, doubted=(both, other)))
    seen = Accusers()
    seen.adopt(parts, 0)
    assert seen.doubted(1) == (both,)


def test_guardians_are_others_and_count_once_in_place() -> None:
    guards = guarded_layers(PLAN, dict.fromkeys("abc", 9), lambda layer: 1)
    assert set(guards) == {0, 1} and guards[0] != "a" and guards[1] != "b"
    assert guarded_layers(PLAN, {"a": 9}, lambda layer: 1) == {1: "a"}, "of whom leaves, too"

    def way(holder: str, guardian: str) -> tuple[int, int]:
        return 1_000, 9_000_000_000 if guardian == "c" else 0

    guards = guarded_layers(PLAN, dict.fromkeys("abc", 9), lambda layer: 1, way)
    assert guards == {0: "b", 1: "a"}, "a step would wait for a long line"
    receipts = Receipts(VIEW, {0: "c"}, ())
    assert receipts.waits_for(7) == ()
    receipts.receipt("b", VIEW, 7, (0,))
    assert receipts.waits_for(7) == ()
    receipts.receipt("c", VIEW, 7, (0,))
    assert receipts.waits_for(7) == () and receipts.waits_for(8) == (0,)


def test_nobody_guards_more_than_there_is_room_for() -> None:
    stages = Stage("a", 0, 3, 1), Stage("b", 3, 4, 1)
    plan = Plan((Pipeline(stages, 0, 4),), ("c", "d"), 1)

    def guards(**room_bytes: int) -> dict[int, str]:
        return guarded_layers(plan, room_bytes, lambda layer: 10 if layer else 25)

    assert guards(a=99, b=99, c=99, d=99) == {0: "c", 1: "c", 2: "c", 3: "d"}
    assert guards(a=99, b=99, c=44, d=45) == {0: "d", 1: "d", 2: "d", 3: "c"}, "all in one place"
    assert guards(a=9, b=0, c=30, d=15) == {0: "c", 1: "d"}, "else where they fit"
    assert guards(a=10, b=20, c=0, d=0) == {1: "b", 2: "b", 3: "a"}, "a layer that fits nowhere"


def test_what_the_plan_takes_is_no_room() -> None:
    """The plan takes memory beside what everybody has; it takes nothing of an accelerator's
    host."""
    million = msgspec.structs.replace(WORKLOAD.block, parameter_count=4 << 20, state_bytes=64 << 20)
    workload = msgspec.structs.replace(WORKLOAD, block=million)
    plan = Plan((Pipeline((Stage("a", 0, 3, 1), Stage("b", 3, 6, 1)), 0, 4),), (), 1)

    def unguarded(a_mib: int, b_mib: int, b_kind: str = "cpu") -> tuple[int, ...]:
        devices = [device(memory_bytes=mib << 20) for mib in (a_mib, b_mib)]
        devices[1] = msgspec.structs.replace(devices[1], kind=b_kind)
        records = [record(name, device=made) for name, made in zip("ab", devices, strict=True)]
        members = tuple(Member(name, 1) for name in "ab")
        whole = Snapshot(
            "r", workload, 1, VIEW, False, sorted_records(records), members, (), 0, None
        )
        assert not unguarded_layers(whole, NoPlan("none"))
        return unguarded_layers(whole, plan)

    stage_mib, guard_mib = 2 * (64 + 16) + 1, 2 * 96 + 1
    assert unguarded(stage_mib + guard_mib, stage_mib + guard_mib) == ()
    assert unguarded(stage_mib + guard_mib - 2, stage_mib + guard_mib) == (4,)
    assert unguarded(stage_mib, stage_mib + guard_mib) == (3, 4), "but the head, which is small"
    assert unguarded(stage_mib + guard_mib, guard_mib) == (1, 2)
    assert unguarded(stage_mib + guard_mib, guard_mib, "cuda") == ()


def test_a_guardian_that_begins_again_is_waited_for_until_given_up() -> None:
    receipts = Receipts(VIEW, {0: "c", 1: "d"}, ())
    receipts.receipt("c", VIEW, 7, (0,))
    receipts.receipt("d", VIEW, 7, (1,))
    receipts.begins_again("c")
    assert receipts.waits_for(8) == (0, 1)
    assert receipts.give_up(8) == ("c",) and receipts.waits_for(8) == (1,)
    receipts.receipt("c", VIEW, 8, (0,))
    assert receipts.waits_for(9) == (0, 1)
    assert receipts.give_up(9) == (), "they have the states, and are only late"


def test_who_waits_for_a_guardian_that_begins_again_says_so() -> None:
    """The peer said that it waits for nobody, and the others went on without it."""
    receipts = Receipts(VIEW, {0: "c"}, ())
    receipts.receipt("c", VIEW, 7, (0,))
    assert receipts.owed(7) == () and receipts.owed(8) == ("c",)
    receipts.begins_again("c")
    assert receipts.owed(8) == ("c",)
    receipts.give_up(8)
    assert receipts.owed(8) == ()


def test_who_is_given_up_again_and_again_is_waited_for_no_more() -> None:
    """The guardian gave a receipt, and then asked anew for everything. Each such pair cost ten
    seconds."""
    receipts = Receipts(VIEW, {0: "c"}, ())
    waits = 0
    for step in range(7, 20):
        receipts.receipt("c", VIEW, step, (0,))
        receipts.begins_again("c")
        waits += bool(receipts.waits_for(step + 1))
        receipts.give_up(step + 1)
    assert waits == GIVEN_UP_LIMIT


def test_who_has_the_states_at_once_is_waited_for_from_the_first_step() -> None:
    receipts = Receipts(VIEW, {0: "c", 1: "d"}, {0, 5})
    assert receipts.waits_for(7) == (0,) and not receipts.received_all_of("c")
    receipts.receipt("c", VIEW, 7, (0,))
    assert receipts.waits_for(7) == () and receipts.received_all_of("c")
    assert receipts.waits_for(8) == (0,), "nobody waits for d until its first receipt"


def test_one_guardian_that_nobody_waits_for_is_enough_for_a_step_not_to_be_safe() -> None:
    receipts = Receipts(VIEW, {0: "c", 1: "d"}, {0})
    receipts.receipt("c", VIEW, 7, (0,))
    assert receipts.waits_for(7) == () and not receipts.are_of_all(7)
    assert not receipts.are_of_all(None)
    receipts.receipt("d", VIEW, 7, (1,))
    assert receipts.are_of_all(7) and receipts.are_of_all(None) and not receipts.are_of_all(8)
    receipts.begins_again("d")
    receipts.receipt("c", VIEW, 8, (0,))
    receipts.give_up(8)
    assert receipts.waits_for(8) == () and not receipts.are_of_all(8)
    assert Receipts(VIEW, {}, ()).are_of_all(7), "nothing is held alone"


def test_steps_past_the_end_count_for_nothing() -> None:
    far, everything = 10**9, {0: 10**9, 1: 10**9}
    honest = [part(A, {0: 7}), part(B, {1: 7})]
    for present in (PRESENT, None):  # a member, and a newcomer
        liar = part(C, {}, present=present, pending=None, step=far)
        liar = msgspec.structs.replace(liar, held=everything, lineages={far: "made up"})
        assert recover([*honest, liar], 2, TERMS).target == Target(7, BASE)
        cut = SavedState(far, "made up", (0, 1))
        liar = part(C, {}, present=present, pending=None, step=far, cuts=(cut,))
        assert recover([*honest, liar], 2, TERMS).target == Target(7, BASE)
        saved = msgspec.structs.replace(liar, cuts=(), saved=(cut,), accepts_loss=True)
        assert recover([*honest, saved], 2, TERMS).target == Target(7, BASE)


def test_a_claimed_step_does_not_send_all_back_to_a_cut() -> None:
    cut = SavedState(3, "cut", (0, 1))
    liar = part(C, {}, pending=None, step=10**9, cuts=(cut,))
    assert recover([part(A, {0: 7}), part(B, {1: 7}), liar], 2, TERMS).target == Target(7, BASE)


def test_of_two_lineages_of_one_length_counts_the_one_of_more_members() -> None:
    for lineage in ("0", "zzz"):
        newcomer = part(C, {0: 7, 1: 7}, lineages={7: lineage}, present=None, pending=None)
        assert recover([part(A, {0: 7}), part(B, {1: 7}), newcomer], 2).target == Target(7, BASE)


def test_an_outcome_that_is_told_counts_less_than_what_was_signed() -> None:
    for norm in (2.0, 3.0, 4.0):
        told = msgspec.structs.replace(OUTCOME, gradient_norm=norm)
        liar = part(C, {}, retained=RetainedStep(VIEW, 7, BASE, told, ()), pending=None, step=8)
        result = recover([part(A, {0: 7}, "a"), part(B, {1: 7}, "b"), liar], 2)
        assert result.outcome == OUTCOME


def test_who_is_far_ahead_shows_it_by_what_others_have_signed() -> None:
    retained = RetainedStep(VIEW, 7, BASE, OUTCOME, (0, 1), signed("ab"))
    ahead = part(A, {0: 8, 1: 8}, retained=retained, pending=None)
    behind = part(C, {}, step=2, pending=None)
    behind = msgspec.structs.replace(behind, held={0: 2, 1: 2}, lineages={2: "old"})
    assert recover([ahead, behind], 2).target == Target(8, AFTER)


def test_who_alone_has_the_layers_after_a_step_that_it_cannot_show_is_believed() -> None:
    """In audited runs all Prepared may be too many to pass on. Believing this peer is better than
    waiting for layers that are lost with their other holder."""
    few = RetainedStep(VIEW, 7, BASE, OUTCOME, (0, 1), signed("a"))
    ahead = part(B, {0: 8, 1: 8}, retained=few, pending=None, step=8)
    behind = part(A, {0: 7})
    assert recover([ahead, behind], 2).target == Target(8, AFTER)
    whole = part(A, {0: 7, 1: 7})
    assert recover([ahead, whole], 2).target == Target(7, BASE), "one step is repeated"


# what one contributor claims, and cannot show ---------------------------------------------------

FAR = 60
FAKE = SavedState(FAR, "made up", (0, 1))
EVERYTHING = {0: FAR, 1: FAR}


def honest() -> list[Contribution]:
    return [part(A, {0: 7}), part(B, {1: 7})]


def lie(**changes: object) -> Contribution:
    """What a member without a stage claims within the run's length."""
    return msgspec.structs.replace(part(C, {}, pending=None), **changes)


@pytest.mark.parametrize("present", [PRESENT, None])
def test_a_step_within_the_run_that_nobody_else_has_taken_counts_for_nothing(
    present: PresentView | None,
) -> None:
    for claim in (
        lie(present=present, step=FAR),
        lie(present=present, step=FAR, held=EVERYTHING, lineages={FAR: "made up"}),
        lie(present=present, step=8, held={0: 8, 1: 8}, lineages={8: "made up"}),
        lie(present=present, step=FAR, cuts=(FAKE,)),
        lie(present=present, step=FAR, saved=(FAKE,), accepts_loss=True),
    ):
        result = recover([*honest(), claim], 2, TERMS)
        assert result.target == Target(7, BASE) and not result.lost_layers, claim


def test_who_says_that_its_view_has_no_plan_is_judged_by_what_its_fellows_say() -> None:
    """One member said that it is in a view that trains nobody, and its word was taken. All members
    of a view have the same word on its plan. All others threw their layers away and fetched the
    liar's, however often works were audited."""
    no_plan = PresentView(VIEW, PRESENT.members, None)
    for step in (8, FAR):
        told = {"step": step, "held": {0: step, 1: step}, "lineages": {step: "made up"}}
        claim = lie(present=no_plan, **told)
        assert recover([*honest(), claim], 2, TERMS).target == Target(7, BASE)
        by_holder = lie(member=B, present=no_plan, **told)
        assert recover([part(A, {0: 7, 1: 7}), by_holder], 2, TERMS).target == Target(7, BASE)


@pytest.mark.parametrize("number", [2, 4], ids=["left", "never-taken-over"])
@pytest.mark.parametrize(
    "plan",
    [
        None,
        PLAN,
        Plan((Pipeline((Stage("c", 0, 2, 1),), 0, 4),), ("a", "b"), 1),
        Plan((Pipeline((Stage("a", 0, 1, 1), Stage("c", 1, 2, 1)), 0, 4),), ("b",), 1),
    ],
    ids=["no-plan", "as-now", "it-alone", "with-another"],
)
def test_who_says_that_it_is_in_another_view_is_judged_by_where_the_others_are(
    number: int, plan: Plan | None
) -> None:
    """The liar says that it is in a view that all have left, or that a failure has overtaken. All
    know that view, and nobody else is in it. All threw their layers away for a state to which the
    liar said it has come there."""
    there = PresentView(ViewId(number, "elsewhere"), (A, B, C), plan)
    for step in (8, FAR):
        told = {"step": step, "held": {0: step, 1: step}, "lineages": {step: "made up"}}
        claim = lie(present=there, **told)
        assert recover([*honest(), claim], 2, TERMS).target == Target(7, BASE)
        cut = lie(present=there, step=step, cuts=(SavedState(step, "made up", (0, 1)),))
        assert recover([*honest(), cut], 2, TERMS).target == Target(7, BASE)
        assert BelievedClaims([*honest(), claim], slack_steps=1).furthest() <= 8
    same = lie(present=there, step=7, held={0: 7, 1: 7}, lineages={7: "made up"})
    spare = part(Member("d", 1), {}, pending=PendingStep(7, BASE, (), ()))
    assert recover([part(A, {0: 7}), spare, same], 2, TERMS).lost_layers == (1,)


def test_who_has_taken_over_first_shows_that_the_step_before_was_committed() -> None:
    """A is in the next view, and the others are in the middle of the step that led to it."""
    there = PresentView(ViewId(4, "next"), (A, B, C), PLAN)
    retained = RetainedStep(VIEW, 7, BASE, OUTCOME, (0,), signed("ab"))
    ahead = part(A, {0: 8}, retained=retained, pending=None, present=there)
    result = recover([ahead, part(B, {1: 7}, "b"), part(C, {})], 2)
    assert result.target == Target(8, AFTER) and result.held[B] == (1,)


def test_anothers_word_of_a_step_does_not_show_what_that_step_has_led_to() -> None:
    """A holder keeps its own Prepared back and has that of all others. It gives a made-up state for
    what the step comes to."""
    of_others = PendingStep(8, "made up", signed("a"), ())
    told = {"step": 8, "held": {0: 8, 1: 8}, "lineages": {8: "made up"}}
    for member in (B, C):
        claim = lie(member=member, pending=of_others, **told)
        holders = [part(A, {0: 7, 1: 7}, "a")] if member == B else honest()
        assert recover([*holders, claim], 2, TERMS).target == Target(7, BASE)
    own = RetainedStep(VIEW, 7, BASE, OUTCOME, (0, 1), signed("ab"))
    committed = part(B, {0: 8, 1: 8}, retained=own, pending=None, step=8)
    assert recover([part(A, {0: 7}, "a"), committed], 2).target == Target(8, AFTER)


def test_a_stage_holder_that_lies_is_refuted_by_the_other_ones() -> None:
    claim = lie(member=B, step=FAR, held=EVERYTHING, lineages={FAR: "made up"})
    result = recover([part(A, {0: 7, 1: 7}), claim], 2, TERMS)
    assert result.target == Target(7, BASE)


def test_states_of_another_lineage_are_not_taken_instead_of_lost_ones() -> None:
    """B has gone with layer 1. C says that it has all layers, as of the same step."""
    claim = lie(step=7, held={0: 7, 1: 7}, lineages={7: "made up"})
    spare = part(Member("d", 1), {}, pending=PendingStep(7, BASE, (), ()))
    assert recover([part(A, {0: 7}), spare, claim], 2, TERMS).lost_layers == (1,)


def test_a_false_cut_is_not_taken_where_layers_are_lost() -> None:
    spare = part(Member("d", 1), {}, pending=PendingStep(7, BASE, (), ()))
    for cut in (FAKE, SavedState(7, "made up", (0, 1))):
        claim = lie(step=7, cuts=(cut,))
        assert recover([part(A, {0: 7}), spare, claim], 2, TERMS).lost_layers == (1,)


def test_an_outcome_that_is_told_alone_and_not_shown_is_not_applied() -> None:
    """B has gone. C guards its layer, and says that B had said Prepared."""
    told = RetainedStep(VIEW, 7, BASE, OUTCOME, (1,))
    guardian = part(C, {1: 7}, retained=told, pending=None, step=8)
    assert recover([part(A, {0: 7}, "a"), guardian], 2).target == Target(7, BASE)
    shown = msgspec.structs.replace(told, prepared=signed("ab"))
    guardian = msgspec.structs.replace(guardian, retained=shown)
    assert recover([part(A, {0: 7}, "a"), guardian], 2).target == Target(8, AFTER)


def test_prepared_of_other_states_show_nothing_of_these() -> None:
    elsewhere = PendingStep(7, "made up", signed("ab"), (0, 1))
    claim = lie(step=7, held={0: 7, 1: 7}, lineages={7: "made up"}, pending=elsewhere)
    assert recover([*honest(), claim], 2).target == Target(8, AFTER), "theirs, which is shown"


def test_one_that_accepts_the_loss_does_not_cost_the_others_what_they_wait_for() -> None:
    saved = SavedState(3, "old", (0, 1))
    waiting = [part(A, {0: 7}, saved=(saved,)), part(C, {}, step=7)]
    hasty = part(Member("d", 1), {}, step=7, accepts_loss=True)
    assert recover([*waiting, hasty], 2).lost_layers == (1,)
    also = msgspec.structs.replace(waiting[1], accepts_loss=True)
    assert recover([waiting[0], also, hasty], 2).target == Target(3, "old")


def test_who_says_less_than_it_has_signed_does_not_hold_back_the_others() -> None:
    """B has said Prepared of step 7, and now claims that it is at step 2."""
    retained = RetainedStep(VIEW, 7, BASE, OUTCOME, (0,), signed("ab"))
    ahead = part(A, {0: 8, 1: 8}, retained=retained, pending=None)
    liar = lie(member=B, step=2, held={0: 2, 1: 2}, lineages={2: "old"})
    assert recover([ahead, liar], 2).target == Target(8, AFTER)


def test_where_prepared_do_not_travel_most_stage_holders_decide() -> None:
    """One of many stage-holders alone has committed the last step, and another one denies
    everything."""
    members = [Member(f"p{n:02}", 1) for n in range(18)]
    stages = tuple(Stage(m.peer_id, n, n + 1, 1) for n, m in enumerate(members))
    plan = Plan((Pipeline(stages, 0, 4),), (), 1)
    present = PresentView(VIEW, tuple(members), plan)
    said = tuple(stated(prepared(m.peer_id)).signed for m in members[1:])
    outcome = msgspec.structs.replace(OUTCOME, token_count=36)
    after = Target(8, extend(BASE, 7, VIEW, outcome.digest))
    retained = RetainedStep(VIEW, 7, BASE, outcome, (0,))
    ahead = lie(member=members[0], present=present, step=8, held={0: 8}, retained=retained)
    parts = [msgspec.structs.replace(ahead, lineages={8: after.lineage})]
    for n, member in enumerate(members[1:-1], start=1):
        pending = PendingStep(7, BASE, (said[n - 1],), (n, 17))
        parts.append(part(member, {n: 7, 17: 7}, pending=pending, present=present))
    liar = lie(member=members[-1], present=present, step=2, held={17: 2}, lineages={2: "old"})
    assert recover([*parts, liar], 18).target == after
    far = msgspec.structs.replace(liar, step=FAR, held=EVERYTHING, lineages={FAR: "made up"})
    assert recover([*parts, far], 18).target == after
    for false in ({"token_count": 4}, {"gradient_norm": 0.1}, {"take_over": VIEW}, {"kept": 3}):
        told = msgspec.structs.replace(outcome, **false)
        other = msgspec.structs.replace(retained, outcome=told)
        lineages = {8: extend(BASE, 7, VIEW, told.digest)}
        first = msgspec.structs.replace(parts[0], retained=other, lineages=lineages)
        assert recover([first, *parts[1:], liar], 18).outcome is None


def test_a_claim_of_steps_does_not_change_what_a_planned_view_starts_from() -> None:
    claims = BelievedClaims([*honest(), lie(step=FAR)], slack_steps=1)
    assert claims.furthest() == 7


def test_a_prepared_that_was_refused_does_not_undo_the_signed_ones() -> None:
    """B has first said something else, of tokens that it cannot have counted. That word is kept as
    evidence, and tells nothing of the step."""
    other = msgspec.structs.replace(prepared("b"), squared_norms={1: -1.0})
    pending = PendingStep(7, BASE, (*signed("ab"), stated(other).signed), (0, 1))
    result = recover([part(A, {0: 7, 1: 7}, pending=pending)], 2)
    assert result.target == Target(8, AFTER)


def test_of_two_words_of_one_peer_that_counts_by_which_somebody_has_committed() -> None:
    other = msgspec.structs.replace(prepared("b"), token_count=3)
    pending = PendingStep(7, BASE, (signed("a")[0], stated(other).signed), (0, 1))
    retained = RetainedStep(VIEW, 7, BASE, OUTCOME, (0,), signed("ab"))
    ahead = part(A, {0: 8}, retained=retained, pending=None)
    guardian = part(C, {1: 7}, pending=pending)
    assert recover([ahead, guardian], 2).target == Target(8, AFTER)
    both = PendingStep(7, BASE, (*signed("ab"), stated(other).signed), (0, 1))
    assert recover([part(A, {0: 7}), part(C, {1: 7}, pending=both)], 2).target == Target(7, BASE)


def test_what_was_prepared_in_a_view_that_was_given_up_shows_nothing_of_this_one() -> None:
    """All were at step 60 before, and went back; one says that it still is there."""
    old = msgspec.structs.replace(prepared("a"), view=ViewId(1, "before"), step=FAR - 1)
    given_up = PendingStep(7, BASE, (stated(old).signed,), (0,))
    parts = [part(A, {0: 7}, pending=given_up), part(B, {1: 7}), lie(step=FAR, pending=given_up)]
    assert recover(parts, 2, TERMS).target == Target(7, BASE)


# what one says alone beyond where most are ------------------------------------------------------


def of_many(count: int) -> tuple[list[Member], PresentView, tuple[Signed, ...]]:
    """Many members that each hold a layer, with everybody's Prepared of step 7."""
    members = [Member(f"p{n:02}", 1) for n in range(count)]
    stages = tuple(Stage(m.peer_id, n, n + 1, 1) for n, m in enumerate(members))
    present = PresentView(VIEW, tuple(members), Plan((Pipeline(stages, 0, 4),), (), 1))
    norms = [msgspec.structs.replace(prepared(m.peer_id), squared_norms={}) for m in members]
    return members, present, tuple(stated(it).signed for it in norms)


@pytest.mark.parametrize("norm", [1e155, 1.7e308])
@pytest.mark.parametrize("view", [VIEW, ViewId(1, "of which nobody knows")])
def test_a_told_norm_whose_square_is_beyond_all_numbers_stops_nobody(
    norm: float, view: ViewId
) -> None:
    """One member told such an outcome. All that gathered with it ended in `OverflowError`, in each
    attempt anew: no view came any more, and no member was to blame."""
    outcome = msgspec.structs.replace(OUTCOME, gradient_norm=norm)
    told = RetainedStep(view, 7, BASE, outcome, ())
    liar = part(C, {}, pending=None, step=8, retained=told)
    assert recover([part(A, {0: 7}), part(B, {1: 7}), liar], 2).target == Target(7, BASE)
    only_copy = msgspec.structs.replace(liar, held={1: 8}, lineages={8: "made up"})
    assert recover([part(A, {0: 7}), only_copy], 2).target is None


def test_a_member_that_counts_more_tokens_than_a_step_has_makes_no_outcome() -> None:
    """Of two members one told, and signed, that its microbatches were more than there are. The sum
    of the tokens fitted into no message: the other ended in `OverflowError`."""
    terms = msgspec.structs.replace(TERMS, microbatch_tokens=2048)
    pipelines = (Pipeline((Stage("a", 0, 2, 1),), 0, 2), Pipeline((Stage("b", 0, 2, 1),), 2, 2))
    present = PresentView(VIEW, (A, B), Plan(pipelines, (), 1))
    invented = (1 << 53) - 1

    def said(peer_id: str, microbatches: int) -> Signed:
        token_count, sums = 2048 * microbatches, {0: (b"1" * 16, b"2" * 16)}
        its = Prepared(VIEW, 7, peer_id, {0: 0.5}, 0.0, token_count, 0.0, 0, None, BASE, sums)
        return stated(its).signed

    both = said("a", 2), said("b", invented)
    honest = PendingStep(7, BASE, both, (0, 1), counts={"a": 2, "b": 2})
    lying = PendingStep(7, BASE, both, (0, 1), counts={"a": 2, "b": invented})
    parts = [
        part(A, {0: 7, 1: 7}, pending=honest, present=present),
        part(B, {0: 7, 1: 7}, pending=lying, present=present),
    ]
    assert recover(parts, 2, terms).target == Target(7, BASE)


def test_a_member_that_tells_of_thousands_of_copies_takes_no_seconds_of_all() -> None:
    """In 72 KB a member told of so many states that each look for a target took three seconds at
    everybody, in which nobody answered the others."""
    saved = tuple(SavedState(n % 7, f"{n}", (0,)) for n in range(1024))
    cuts = tuple(SavedState(n % 7, f"c{n}", (1,)) for n in range(1024))
    lineages = {7: BASE, **{n: f"l{n}" for n in range(8, 1000)}}
    liar = part(C, {0: 7, 1: 7}, pending=None, saved=saved, cuts=cuts)
    liar = msgspec.structs.replace(liar, lineages=lineages, may_repeat=10)
    began_s = time.process_time()
    assert recover([part(A, {0: 7}), part(B, {1: 7}), liar], 2, TERMS).target == Target(7, BASE)
    alone = msgspec.structs.replace(liar, held={0: 7})
    assert recover([part(A, {0: 7}), alone], 2, TERMS).target == Target(0, "c1022")
    assert time.process_time() - began_s < 2


def test_nor_among_sixty_members_that_must_do_without_a_layer() -> None:
    """The last layer has gone with its holder. One of the others told of two thousand copies of all
    but that one, in 210 KB. To find out who may go took seven seconds for each that went."""
    count, there = 64, tuple(range(63))
    members, present, _ = of_many(count)
    parts = [part(m, {n: 7}, pending=None, present=present) for n, m in enumerate(members[:-1])]
    cuts, saved = (
        tuple(SavedState(1 + n % 6, f"{name}{n}", there) for n in range(1024)) for name in "cs"
    )
    parts[1] = msgspec.structs.replace(parts[1], cuts=cuts, saved=saved)
    told = [SavedState(7 + n, f"x{n}", there) for n in range(1024)]
    bound_parts = [*parts[:2], msgspec.structs.replace(parts[2], saved=tuple(told)), *parts[3:]]
    began_s = time.process_time()
    bound = FurthestStep(bound_parts, count, TERMS)
    assert {bound.without(it) for it in bound_parts} == {NOWHERE}
    assert time.process_time() - began_s < 1.5
    assert restart_of(parts, count, TERMS, Epochs(), Undo(("z",), 6, 3)).lost_layers == (63,)


@pytest.mark.parametrize("count", [4, 18])
def test_who_keeps_its_own_prepared_back_does_not_say_what_the_step_came_to(count: int) -> None:
    """Among more than sixteen stage-holders one alone replaced the whole model, because nobody
    could show the contrary."""
    members, present, said = of_many(count)
    parts = []
    for n, member in enumerate(members[1:], start=1):
        pending = PendingStep(7, BASE, (said[n],), (n,))
        parts.append(part(member, {n: 7, 0: 7}, pending=pending, present=present))
    everything = dict.fromkeys(range(count), 8)
    liar = lie(member=members[0], present=present, step=8, held=everything)
    liar = msgspec.structs.replace(liar, lineages={8: "made up"})
    for claim in (liar, msgspec.structs.replace(liar, pending=PendingStep(8, "x", said[1:2], ()))):
        assert recover([claim, *parts], count).target == Target(7, BASE)
    told = RetainedStep(ViewId(1, "of which nobody knows"), 7, BASE, OUTCOME, ())
    lineages = {8: extend(BASE, 7, told.view, OUTCOME.digest)}
    elsewhere = msgspec.structs.replace(liar, retained=told, lineages=lineages)
    assert recover([elsewhere, *parts], count).target == Target(7, BASE)


def test_what_one_tells_of_a_step_is_made_of_the_states_of_those_that_are_there() -> None:
    """Among many, a step counts that one member tells of. A member that has not said Prepared of it
    keeps its layers."""
    members, present, said = of_many(18)
    outcome = msgspec.structs.replace(OUTCOME, token_count=36)
    told = RetainedStep(VIEW, 7, BASE, outcome, ())
    after = Target(8, extend(BASE, 7, VIEW, outcome.digest))
    everything = dict.fromkeys(range(18), 8)
    teller = lie(member=members[0], present=present, step=8, held=everything, retained=told)
    parts = [msgspec.structs.replace(teller, lineages={8: after.lineage})]
    for n, member in enumerate(members[1:], start=1):
        pending = PendingStep(7, BASE, (said[n],), (n,))
        parts.append(part(member, {n: 7}, pending=pending, present=present))
    assert recover(parts, 18).target == after
    has_nothing = PendingStep(7, BASE, (), ())
    parts[5] = msgspec.structs.replace(parts[5], pending=has_nothing)
    assert recover(parts, 18).lost_layers == (5,), "and the teller's has gone on from there"
    parts[6] = msgspec.structs.replace(parts[6], held={0: 7, 6: 7})
    assert recover(parts, 18).target == Target(7, BASE)


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ({}, True),
        ({"gradient_norm": 1e50}, False),
        ({"gradient_norm": 2.0}, False),
        ({"loss": 0.0}, True),
        ({"held_out_loss": 0.0}, True),
    ],
)
def test_of_a_step_that_others_have_signed_one_tells_what_they_cannot_know(
    told: dict[str, float], counts: bool
) -> None:
    """One of eighteen replicas kept its Prepared back, had all agree anew, and told a norm of 1e50:
    the others applied next to nothing, and nobody was to blame. Its own loss is still its word."""
    members = [Member(f"p{n:02}", 1) for n in range(18)]
    each = tuple(Pipeline((Stage(it.peer_id, 0, 2, 1),), n, 1) for n, it in enumerate(members))
    present = PresentView(VIEW, tuple(members), Plan(each, (), 1))
    right = StepOutcome(7, 0.5, 1.0, 36, None, None)
    outcome = msgspec.structs.replace(right, **told)
    parts = []
    for member in members[1:]:
        its = Prepared(VIEW, 7, member.peer_id, {0: 0.25}, 2.0, 2, 0.0, 0, None, base=BASE)
        pending = PendingStep(7, BASE, (stated(its).signed,), (0, 1))
        parts.append(part(member, {0: 7, 1: 7}, pending=pending, present=present))
    after = Target(8, extend(BASE, 7, VIEW, outcome.digest))
    retained = RetainedStep(VIEW, 7, BASE, outcome, ())
    teller = lie(member=members[0], present=present, step=8, held={0: 8, 1: 8}, retained=retained)
    teller = msgspec.structs.replace(teller, lineages={8: after.lineage})
    assert recover([teller, *parts], 2).target == (after if counts else Target(7, BASE))
    its = Prepared(VIEW, 7, members[1].peer_id, {0: -1.0}, 2.0, 2, 0.0, 0, None, base=BASE)
    pending = PendingStep(7, BASE, (stated(its).signed,), (0, 1))
    refused = msgspec.structs.replace(parts[-1], pending=pending)
    assert recover([teller, *parts[:-1], refused], 2).target is not None, "nobody errs over it"


def test_the_loss_of_a_step_is_what_those_have_signed_that_made_it() -> None:
    """One with a first stage told another loss than the stages with the head had signed."""
    members, present, said = of_many(18)
    parts = []
    for n, member in enumerate(members[1:], start=1):
        pending = PendingStep(7, BASE, (said[n],), (n, 0))
        parts.append(part(member, {n: 7, 0: 7}, pending=pending, present=present))
    for false in ({"loss": 3.0}, {"loss": None}, {"held_out_loss": 3.0}):
        outcome = msgspec.structs.replace(OUTCOME, token_count=36, **false)
        lineages = {8: extend(BASE, 7, VIEW, outcome.digest)}
        retained = RetainedStep(VIEW, 7, BASE, outcome, ())
        teller = lie(member=members[0], present=present, step=8, held={0: 8}, retained=retained)
        teller = msgspec.structs.replace(teller, lineages=lineages)
        assert recover([teller, *parts], 18).target == Target(7, BASE), false


def test_two_that_say_that_they_are_far_ahead_send_nobody_back() -> None:
    members, present, _ = of_many(5)
    parts = [
        part(member, {n: 7, 3: 7, 4: 7}, present=present) for n, member in enumerate(members[:3])
    ]
    far = msgspec.structs.replace(prepared(members[3].peer_id), step=FAR - 1)
    fellow = part(members[3], {3: 7}, present=present)
    shown = PendingStep(FAR, "made up", (stated(far).signed,), ())
    everything = dict.fromkeys(range(5), FAR)
    liar = lie(member=members[4], present=present, step=FAR, held=everything, pending=shown)
    parts += [fellow, msgspec.structs.replace(liar, lineages={FAR: "made up"})]
    assert BelievedClaims(parts).furthest() <= 8
    assert BelievedClaims(parts, slack_steps=1).furthest() <= 8, "nor does a planned view say so"
    assert recover(parts, 5, TERMS).target == Target(7, BASE)


def test_who_alone_has_a_layer_does_not_have_all_others_take_its_own_model() -> None:
    """Guardians lag, and without that member's layer all go back to the cut."""
    members, present, said = of_many(3)
    cut = SavedState(4, "as of step 4", (0, 1, 2))
    parts = [
        part(member, {n: 7}, pending=PendingStep(7, BASE, (said[n],), (n,)), present=present)
        for n, member in enumerate(members[:2])
    ]
    parts = [msgspec.structs.replace(it, cuts=(cut,)) for it in parts]
    liar = lie(member=members[2], present=present, step=8, held={0: 8, 1: 8, 2: 8})
    made_up = msgspec.structs.replace(liar, lineages={8: "made up"})
    assert recover([*parts, made_up], 3).target == Target(4, "as of step 4")
    told = RetainedStep(VIEW, 7, BASE, msgspec.structs.replace(OUTCOME, token_count=6), ())
    after = Target(8, extend(BASE, 7, VIEW, msgspec.structs.replace(OUTCOME, token_count=6).digest))
    teller = msgspec.structs.replace(liar, retained=told, lineages={8: after.lineage})
    found = recover([*parts, teller], 3)
    assert found.target == after and found.rolled == (VIEW, 7, BASE)
    assert found.held[members[0]] == (0,) and found.held[members[1]] == (1,), (
        "their own, as they are"
    )
    behind = msgspec.structs.replace(parts[1], pending=PendingStep(7, BASE, (), ()))
    assert recover([parts[0], behind, teller], 3).target == Target(4, "as of step 4")
