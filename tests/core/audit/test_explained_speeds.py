"""In pipelines of several stages nobody alone sees how fast a stage is, but everybody sees how long
steps take."""

from itertools import product

import msgspec
import pytest

from p2p_dtfm.core.audit.believed_speeds import pace_of
from p2p_dtfm.core.audit.explained_speeds import is_borne_out, with_explained_speeds
from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.planner.planner import compute_plan, fixed_plan
from p2p_dtfm.core.planner.recomputation import problem_in_force
from p2p_dtfm.core.protocol.measured_plans import MeasuredPlan, shape_of
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Intent, LayerTiming
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Snapshot
from tests.core.planning import MEBIBYTE, Peer, name_of, snapshot

TRUE_NS, SAID_NS = 30_000_000, 1_500_000
HALF = 174 * MEBIBYTE
"""Memory for a part of the twelve blocks, and for what these keep of some microbatches."""
LIAR = 5


def swarm(*block_ns: int) -> Snapshot:
    return snapshot([Peer(each, HALF) for each in block_ns])


def planned(made: Snapshot) -> Plan:
    plan = compute_plan(made)
    assert isinstance(plan, Plan)
    return plan


def timed(made: Snapshot, *plans: tuple[Plan, int], but: frozenset[int] = frozenset()) -> Snapshot:
    """A snapshot with the last plan in force, and step times that all but some members tell."""
    told = tuple(MeasuredPlan(shape_of(plan), step_ns) for plan, step_ns in plans)
    records = tuple(
        record if number in but else msgspec.structs.replace(record, measured=told)
        for number, record in enumerate(made.records)
    )
    return msgspec.structs.replace(made, records=records, present=plans[-1][0])


def takes_ns(plan: Plan, *block_ns: int) -> int:
    """The time of a step where machines are that fast, predicted with the same cuts and shares."""
    return predicted_ns(swarm(*block_ns), plan)


def predicted_ns(made: Snapshot, plan: Plan) -> int:
    model = StepModel(problem_in_force(made, plan))
    numbers = {peer: at for at, peer in enumerate(model.problem.peer_ids)}
    placement = tuple(tuple(numbers[it.peer_id] for it in p.stages) for p in plan.pipelines)
    cuts = [(0, *(it.end_layer for it in p.stages)) for p in plan.pipelines]
    pipelines = model.pipelines_in(len(placement))
    costs = [pipelines.time_fixed(*pair) for pair in zip(placement, cuts, strict=True)]
    whole = [cost for cost in costs if cost is not None]
    assert len(whole) == len(costs)
    return model.dealt(placement, whole, tuple(p.microbatch_count for p in plan.pipelines)).step_ns


def slowed(found: Snapshot | None, made: Snapshot) -> set[str]:
    """The peers that the planner takes to be slower than they say."""
    if found is None:
        return set()
    pairs = zip(found.records, made.records, strict=True)
    work = made.workload
    return {it.peer_id for it, old in pairs if pace_of(it.device, work) > pace_of(old.device, work)}


SAID = (TRUE_NS,) * 5 + (SAID_NS,)
TRUE = (TRUE_NS,) * 6


def test_whose_word_explains_late_steps_has_as_much_to_do_as_the_others() -> None:
    made = swarm(*SAID)
    before = planned(made)
    took_ns = takes_ns(before, *TRUE)
    assert took_ns > 1.5 * takes_ns(before, *SAID), "it is believed at first"
    late = timed(made, (before, took_ns))
    found = with_explained_speeds(late, problem_in_force)
    assert slowed(found, late) == {name_of(LIAR)}
    after = planned(late)
    assert takes_ns(after, *TRUE) < 0.7 * took_ns
    assert takes_ns(after, *TRUE) < 1.1 * takes_ns(planned(swarm(*TRUE)), *TRUE)


def test_a_kind_of_layer_that_it_says_is_slow_on_it_hides_nobody() -> None:
    """A liar in the middle never gets the head, and with that claim it was no faster than the
    others."""
    made = swarm(*SAID)
    liar = made.records[LIAR]
    device = msgspec.structs.replace(liar.device, head=LayerTiming(1 << 40, 1 << 40))
    liar = msgspec.structs.replace(liar, device=device)
    made = msgspec.structs.replace(made, records=(*made.records[:LIAR], liar))
    before = planned(made)
    assert len(before.layers_of(name_of(LIAR))) > 3, "it gets blocks"
    late = timed(made, (before, takes_ns(before, *TRUE)))
    found = with_explained_speeds(late, problem_in_force)
    assert slowed(found, late) == {name_of(LIAR)}
    assert found is not None
    assert found.record(name_of(LIAR)).device.head == device.head
    assert takes_ns(planned(late), *TRUE) < 0.7 * takes_ns(before, *TRUE)


def test_it_stays_so_while_both_plans_are_remembered() -> None:
    made = swarm(*SAID)
    before = planned(made)
    late = timed(made, (before, takes_ns(before, *TRUE)))
    after = planned(late)
    both = timed(made, (before, takes_ns(before, *TRUE)), (after, takes_ns(after, *TRUE)))
    assert shape_of(planned(both)) == shape_of(after)


def test_two_that_say_so_together_are_found_together() -> None:
    said, true = (*SAID, TRUE_NS, SAID_NS), (TRUE_NS,) * 8
    made = swarm(*said)
    before = planned(made)
    late = timed(made, (before, takes_ns(before, *true)))
    assert takes_ns(planned(late), *true) < 0.8 * takes_ns(before, *true)


def test_steps_as_planned_ask_for_no_explanation() -> None:
    for said in (SAID, TRUE):
        made = swarm(*said)
        plan = planned(made)
        assert with_explained_speeds(made, problem_in_force) is None
        for percent in (60, 100, 149):
            seen = timed(made, (plan, takes_ns(plan, *said) * percent // 100))
            assert with_explained_speeds(seen, problem_in_force) is None


def test_who_is_as_fast_as_it_says_keeps_its_work_where_something_else_is_slow() -> None:
    """All but the fastest are half as fast as they say, as when other programs run on their
    machines."""
    made = swarm(*SAID)
    plan = planned(made)
    true = (2 * TRUE_NS,) * 5 + (SAID_NS,)
    assert takes_ns(plan, *true) * 2 > 3 * takes_ns(plan, *SAID)
    late = timed(made, (plan, takes_ns(plan, *true)))
    assert with_explained_speeds(late, problem_in_force) is None


@pytest.mark.parametrize(("is_audited", "heard"), [(True, {name_of(LIAR)}), (False, set())])
def test_a_liar_that_does_not_tell_is_heard_of_by_the_others(
    is_audited: bool, heard: set[str]
) -> None:
    """Elsewhere a silent peer has forgotten its times, since it has another speed by now."""
    made = swarm(*SAID)
    if is_audited:
        bars = tuple(Bar(GENESIS, 0, it.peer_id, 0, 0, "known") for it in made.records)
        made = msgspec.structs.replace(made, bars=bars)
    plan = planned(made)
    late = timed(made, (plan, takes_ns(plan, *TRUE)), but=frozenset({LIAR}))
    assert slowed(with_explained_speeds(late, problem_in_force), late) == heard


def test_a_guess_that_made_it_worse_is_taken_back() -> None:
    made = swarm(*SAID)
    before = planned(made)
    took_ns = takes_ns(before, *TRUE)
    after = planned(timed(made, (before, took_ns)))
    for percent, is_explained in ((112, True), (150, False)):
        worse = timed(made, (before, took_ns), (after, took_ns * percent // 100))
        assert (with_explained_speeds(worse, problem_in_force) is not None) is is_explained
        assert not is_borne_out(after, worse)
        found, by_words = planned(worse), before.layers_of(name_of(LIAR))
        assert len(found.layers_of(name_of(LIAR))) == len(by_words)


def test_who_is_no_faster_than_the_middle_one_is_never_doubted() -> None:
    for speeds, late in product(((TRUE_NS,) * 6, (TRUE_NS,) * 3 + (2 * TRUE_NS,) * 3), (2, 5, 50)):
        made = swarm(*speeds)
        plan = planned(made)
        seen = timed(made, (plan, late * takes_ns(plan, *speeds)))
        assert slowed(with_explained_speeds(seen, problem_in_force), seen) <= {
            name_of(number) for number in range(3) if speeds[-1] != TRUE_NS
        }


def test_plans_of_others_that_are_gone_or_of_another_model_say_nothing() -> None:
    made = swarm(*SAID)
    plan = planned(made)
    took_ns = takes_ns(plan, *TRUE)
    left = msgspec.structs.replace(made, records=made.records[:-1])
    assert with_explained_speeds(timed(left, (plan, took_ns)), problem_in_force) is None
    shape = tuple((peers, (*cuts[:-1], cuts[-1] + 1)) for peers, cuts in shape_of(plan))
    told = (MeasuredPlan(shape, took_ns),)
    records = tuple(msgspec.structs.replace(it, measured=told) for it in made.records)
    other = msgspec.structs.replace(made, records=records, present=plan)
    assert with_explained_speeds(other, problem_in_force) is None


def test_of_two_nobody_is_the_middle_one() -> None:
    made = snapshot([Peer(TRUE_NS), Peer(SAID_NS)])
    plan = fixed_plan(made, (2,))
    late = timed(made, (plan, 50 * predicted_ns(made, plan)))
    assert with_explained_speeds(late, problem_in_force) is None


def test_nobody_trains_any_more() -> None:
    made = swarm(*SAID)
    plan = planned(made)
    late = timed(made, (plan, takes_ns(plan, *TRUE)))
    records = tuple(msgspec.structs.replace(it, intent=Intent.SPARE) for it in late.records)
    idle = msgspec.structs.replace(late, records=records)
    assert with_explained_speeds(idle, problem_in_force) is None
    assert isinstance(compute_plan(idle), NoPlan)


def test_steps_that_only_one_has_seen_change_nothing() -> None:
    """A liar could otherwise claim such steps of a plan in which it is alone."""
    made = swarm(*SAID)
    plan = planned(made)
    late = timed(made, (plan, takes_ns(plan, *TRUE)))
    for step_ns in (1, 1 << 59):
        alone = MeasuredPlan((((name_of(LIAR),), (0, 14)),), step_ns)
        records = tuple(
            msgspec.structs.replace(it, measured=(*it.measured, alone)) if number == LIAR else it
            for number, it in enumerate(late.records)
        )
        told = msgspec.structs.replace(late, records=records)
        assert slowed(with_explained_speeds(told, problem_in_force), told) == {name_of(LIAR)}
        assert is_borne_out(planned(late), told)
