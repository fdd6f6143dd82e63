"""Cuts: when guardians lag, when copies are taken, and going back to one."""

from dataclasses import replace

import msgspec
import pytest

from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.cost_model.cuts import LIMIT_NS, CutClock, cuts_that_stay, lags, pace_of
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.messages.prepared import Prepared, Statement
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.snapshot import HeldLayer, ViewId
from p2p_dtfm.core.recovery.complete_steps import Target
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence
from p2p_dtfm.core.recovery.restart_point import recover
from p2p_dtfm.core.recovery.view import View
from tests.core.builders import stated
from tests.core.planning import Peer, name_of, snapshot, workload
from tests.core.test_recovery import A, B, C, part

SECOND_NS = 1_000_000_000
FAR = Link(round_trip_ns=80_000_000, bytes_per_s=25_000_000)
OLD = SavedState(4, "as of step 4", (0, 1))


def view_of(step_ns: int, link: Link, peers: int = 3, stages: int = 1, **facts: int) -> View:
    work = workload(blocks=2, block_parameters=100_000)
    found = snapshot([Peer(**facts)] * peers, work, link=link)
    each = 4 // stages
    placed = tuple(Stage(name_of(n), each * n, each * n + each, 1) for n in range(stages))
    spares = tuple(name_of(n) for n in range(stages, peers))
    return View(found, Plan((Pipeline(placed, 0, work.microbatch_count),), spares, step_ns))


# who lags, and how often ---------------------------------------------------------------------


def test_guardians_lag_where_waiting_takes_more_than_a_fiftieth_of_a_step() -> None:
    assert lags([20_000_001], SECOND_NS) and not lags([20_000_000], SECOND_NS)
    assert view_of(SECOND_NS, FAR).cut_pace is not None
    near = Link(round_trip_ns=100_000, bytes_per_s=1 << 30)
    assert view_of(SECOND_NS, near).cut_pace is None, "1.6 MB and no way to speak of: 0.2%"
    long_steps = view_of(10 * SECOND_NS, FAR)
    assert long_steps.cut_pace is None and long_steps.guarded_at_once == {0, 1, 2, 3}
    assert view_of(SECOND_NS, FAR).guarded_at_once == frozenset(), "nobody waits for them"
    assert view_of(SECOND_NS, FAR, peers=1).cut_pace is None, "nobody guards"


def test_who_takes_a_lost_place_and_has_nothing_yet_is_no_second_copy() -> None:
    """Two peers hold all layers from now on, but until the first step commits only one of them has
    any."""
    planned = view_of(SECOND_NS, FAR, peers=2)
    assert planned.starts_with_two_copies, "all have their states by then"
    here = tuple(HeldLayer(name_of(0), layer, 7) for layer in range(4))
    failed = msgspec.structs.replace(planned.snapshot, planned=False, step=7, held=here)
    assert not View(failed, planned.plan).starts_with_two_copies
    older = tuple(HeldLayer(name_of(1), layer, 7 - (layer == 2)) for layer in range(4))
    failed = msgspec.structs.replace(failed, held=here + older)
    assert not View(failed, planned.plan).starts_with_two_copies, "of one it has an older state"
    failed = msgspec.structs.replace(failed, held=here + tuple(as_of(it, 7) for it in older))
    assert View(failed, planned.plan).starts_with_two_copies


def as_of(held: HeldLayer, version: int) -> HeldLayer:
    return msgspec.structs.replace(held, version=version)


def test_without_room_for_copies_at_a_stage_guardians_keep_up() -> None:
    """Each of the two holders would keep 2 x 3 copies of 40 million parameters."""
    work = workload(blocks=2, block_parameters=40_000_000)
    stages = (Stage(name_of(0), 0, 2, 1), Stage(name_of(1), 2, 4, 1))
    plan = Plan((Pipeline(stages, 0, work.microbatch_count),), (name_of(2),), SECOND_NS)
    for room_gib, has_room in ((16, True), (2, False)):
        held = Peer(memory_bytes=room_gib << 30)
        found = snapshot([held, held, Peer(memory_bytes=1 << 36)], work, link=FAR)
        assert (View(found, plan).cut_pace is not None) == has_room
        cost = StepModel(problem_of(found)).cost(((0, 1),))
        assert cost is not None and (cost.reduction_ns == 0) == has_room, "as the planner counts"


def test_a_cut_takes_a_tenth_of_the_line_and_a_failure_costs_what_is_said() -> None:
    copy_ns = 5 * SECOND_NS
    pace = pace_of([copy_ns], 10_000_000, SECOND_NS // 4)
    assert 1 < pace.every_steps * SECOND_NS // 4 <= LIMIT_NS
    assert pace.may_repeat_steps * SECOND_NS // 4 <= LIMIT_NS + SECOND_NS
    slow = pace_of([100 * SECOND_NS], 10_000_000, SECOND_NS)
    assert slow.may_repeat_steps > 200, "a cut that travels for 100 s cannot cost less: it says so"
    assert pace_of([], 0, 3600 * SECOND_NS).every_steps == 1


def test_cuts_that_cost_next_to_nothing_are_taken_each_second() -> None:
    """So small a model is copied in 10 ms. Young's interval would have the swarm go back eight
    seconds, which costs more than all else of a recovery."""
    step_ns = SECOND_NS // 10
    pace = pace_of([SECOND_NS // 50], 1_000_000, step_ns)
    assert pace.every_steps * step_ns == SECOND_NS
    assert pace_of([SECOND_NS // 50], 1_000_000, step_ns // 10).every_steps == 20, "not a hundred"
    over_a_slower_line = pace_of([SECOND_NS // 2], 1_000_000, step_ns)
    assert over_a_slower_line.every_steps * step_ns == 5 * SECOND_NS, "a hundredth of the line"
    far = pace_of([5 * SECOND_NS], 1_000_000, step_ns)
    assert far.every_steps * step_ns > 8 * SECOND_NS, "Young's interval"


# the clock -----------------------------------------------------------------------------------


def test_a_cut_is_whole_when_all_have_said_so_and_then_the_next_may_begin() -> None:
    clock = CutClock(10, 3, {0: "g", 1: "h"})
    assert clock.is_due(10) and not clock.is_due(11) and clock.kept == -1
    clock.taken()
    assert not clock.is_due(10)
    clock.receipt("g", 10, (0, 1))
    clock.receipt("h", 9, (1,))
    assert clock.missing == {1}, "of its own layers, and of this cut"
    assert clock.kept == -1
    clock.receipt("h", 10, (1,))
    assert clock.kept == 10
    assert not clock.committed(10, -1), "another stage-holder's part is on its way"
    assert not clock.committed(13, -1) and not clock.is_due(14), "it waits for the one before"
    assert clock.committed(14, 10) and clock.safe == 10
    assert clock.is_due(15) and clock.kept == 10, "the newest cut that is kept"
    clock.taken()
    assert clock.missing == {0, 1}


def test_a_spare_that_came_while_a_cut_was_under_way_hears_that_it_is_whole() -> None:
    """It took its first step for a cut, of which nobody ever said anything."""
    there, came = CutClock(10, 3, {}), CutClock(12, 3, {}, has_stage=False)
    there.taken()
    assert there.committed(12, -1) is came.committed(12, -1) is False
    assert there.committed(13, 10) and came.committed(13, 10)
    assert there.newest == came.newest == 14 and there.safe == came.safe == 10
    there.taken()
    assert not there.committed(14, 10) and not came.committed(14, 10)
    assert there.committed(15, 14) and came.committed(15, 14)


def test_a_spare_that_heard_of_a_commit_late_hears_of_the_next_cut() -> None:
    there, spare = CutClock(10, 3, {}), CutClock(10, 3, {}, has_stage=False)
    there.taken()
    assert there.committed(12, 10) and there.newest == 13
    there.taken()
    assert spare.committed(14, 10) and spare.newest == 15, "of step 12 it heard too late"
    assert there.committed(15, 13) and spare.committed(15, 13)


def test_what_is_kept_of_no_cut_is_nothing_new_to_who_has_a_stage() -> None:
    """Else a stage-holder that lies would have all others drop what they can go back to."""
    clock = CutClock(10, 3, {})
    clock.taken()
    assert clock.committed(12, 10) and clock.newest == 13
    clock.taken()
    assert not clock.committed(13, 12) and (clock.safe, clock.newest) == (10, 13)


def test_the_newest_whole_cut_and_two_at_most_after_it_are_kept() -> None:
    assert cuts_that_stay([4, 8, 12], safe=8) == {8, 12}
    assert cuts_that_stay([4, 8, 12, 16], safe=4) == {4, 12, 16}, "views that follow one another"
    assert cuts_that_stay([4, 8], safe=4) == {4, 8}
    assert cuts_that_stay([4], safe=8) == set()


def test_the_outcome_says_what_all_have_kept() -> None:
    plan = Plan((Pipeline((Stage("a", 0, 1, 1), Stage("b", 1, 2, 1)), 0, 4),), (), 1)
    transaction = StepTransaction(ViewId(1, "v"), 9, plan)

    def prepared(peer: str, kept: int) -> Statement:
        norms = {0 if peer == "a" else 1: 1.0}
        return stated(Prepared(ViewId(1, "v"), 9, peer, norms, 0.0, 2, 0.0, 0, None, kept=kept))

    with pytest.raises(PeerFault, match="cut"):
        transaction.record(prepared("a", 10))
    transaction.record(prepared("a", 8))
    transaction.record(prepared("b", 4))
    outcome = transaction.outcome()
    assert outcome is not None and outcome.kept == 4


# going back ----------------------------------------------------------------------------------


def test_whoever_is_left_goes_back_to_the_newest_cut_that_is_whole_at_once() -> None:
    newer = SavedState(6, "as of step 6", (0,))
    left = part(A, {0: 7}, "a", cuts=(OLD, newer))
    assert recover([left], 2).target == Target(4, "as of step 4"), "of 6 layer 1 is nowhere"
    other = part(C, {}, step=7, cuts=(SavedState(6, "as of step 6", (1,)),))
    both = recover([left, other], 2)
    assert both.target == Target(6, "as of step 6")
    assert both.held == {A: (0,), C: (1,)}


def test_a_checkpoint_that_is_newer_than_the_cut_is_taken_before_it() -> None:
    """A checkpoint does not replace waiting for lost layers where there is no cut to go back to."""
    saved = SavedState(5, "as of step 5", (0, 1))
    left = part(A, {0: 7}, "a", saved=(saved,))
    assert recover([left], 2).target is None
    with_cut = msgspec.structs.replace(left, cuts=(OLD,))
    assert recover([with_cut], 2).target == Target(5, "as of step 5")
    older = msgspec.structs.replace(with_cut, saved=(SavedState(3, "as of step 3", (0, 1)),))
    assert recover([older], 2).target == Target(4, "as of step 4")


def test_copies_of_unlike_steps_or_lineages_are_no_cut() -> None:
    left = part(A, {0: 7}, "a", cuts=(SavedState(6, "one", (0,)), SavedState(4, "one", (1,))))
    other = part(C, {}, step=7, cuts=(SavedState(6, "another", (1,)),))
    assert recover([left, other], 2).target is None


def test_states_come_before_cuts() -> None:
    parts = [part(A, {0: 7}, "a", cuts=(OLD,)), part(B, {1: 7}, "b")]
    assert recover(parts, 2).target is not None
    assert recover(parts, 2).target > Target(7, "")


def test_a_state_is_rolled_forward_only_with_its_gradient_else_the_copy_is_taken() -> None:
    """The cut is of the very step that others reach by rolling forward."""
    result = recover([part(A, {0: 7}, "a"), part(B, {1: 7}, "b")], 2)
    assert result.target is not None and result.rolled is not None
    recovery_evidence = RecoveryEvidence()
    recovery_evidence.held = {1: 7}
    recovery_evidence.lineage.move_to(7, result.rolled[2])
    held = {**result.held, C: (1,)}
    restart = recovery_evidence.restart(C, replace(result, held=held))
    assert (restart.roll_forward, restart.load) == ((), (1,))
