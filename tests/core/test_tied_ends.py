"""Which peers give each other the sums of a matrix that is both embedding and head."""

from itertools import permutations

import msgspec

from p2p_dtfm.core.commit.judgement import conflict_of, fault_of
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.liveness.waits import PossibleWaits
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import GENESIS
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.schedule.tied_ends import other_end, receivers, states_ends, tied_chunks
from tests.core.builders import run_spec
from tests.core.planning import Peer, snapshot, workload

SHARED_BYTES = 1 << 24


def tied_workload():
    plain = workload(blocks=4, microbatches=8)
    head = msgspec.structs.replace(plain.head, shared_bytes=SHARED_BYTES)
    return msgspec.structs.replace(plain, head=head)


def two_pipelines(stands_in: bool) -> Plan:
    """The pipelines a-b-c and d-f; where `stands_in`, f is lost and c has its place, too."""
    one = (Stage("a", 0, 2, 1), Stage("b", 2, 4, 1), Stage("c", 4, 6, 1))
    last = Stage("c", 4, 6, 1, stands_in=True) if stands_in else Stage("f", 4, 6, 1)
    two = (Stage("d", 0, 4, 1), last)
    return Plan((Pipeline(one, 0, 4), Pipeline(two, 4, 4)), (), 0)


def test_each_end_gets_what_it_lacks_within_its_pipeline() -> None:
    plan = two_pipelines(stands_in=False)
    assert [other_end(plan, peer) for peer in "abcdf"] == [
        (5, "c"), None, (0, "a"), (5, "f"), (0, "d")
    ]  # fmt: skip
    assert receivers(plan, "a") == ((0, "c"),) and receivers(plan, "b") == ()


def test_who_stands_in_gives_its_sum_to_both() -> None:
    plan = two_pipelines(stands_in=True)
    assert other_end(plan, "d") == (5, "c") and other_end(plan, "c") == (0, "a")
    assert receivers(plan, "c") == ((5, "a"), (5, "d"))
    assert receivers(plan, "d") == (), "the one that stands in has it from its own pipeline"


def test_whoever_holds_both_ends_waits_for_nobody() -> None:
    plan = Plan((Pipeline((Stage("a", 0, 6, 1),), 0, 8),), (), 0)
    assert other_end(plan, "a") is None and receivers(plan, "a") == ()


def test_the_parts_are_the_whole_matrix() -> None:
    model = {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 1 << 16}
    bounds = tied_chunks(run_spec(model=model))
    assert bounds == ((0, 1 << 20), (1 << 20, 1 << 21))


def test_a_wait_for_the_other_end_is_one_that_the_plan_knows() -> None:
    plan = two_pipelines(stands_in=False)
    view = View(snapshot([Peer()], tied_workload()), plan)
    tied, untied = PossibleWaits(view, ends_meet=True), PossibleWaits(view)
    for one, other in permutations("abcdf", 2):
        lack = Lack(other, Kind.SUM, 0, 0)
        ends = {one, other} in ({"a", "c"}, {"d", "f"})
        assert tied.allow(Kind.SUM, one, lack) == (ends or untied.allow(Kind.SUM, one, lack))
    assert not untied.allow(Kind.SUM, "a", Lack("c", Kind.SUM, 5, 0))


def test_the_planner_counts_what_the_ends_give_each_other() -> None:
    """Two peers with memory for half a model each get the same plan, slower by the exchange."""
    half = [Peer(memory_bytes=4 * (workload(4, 8).block.state_bytes + (8 << 20)))] * 2
    plain, tied = (snapshot(half, work) for work in (workload(4, 8), tied_workload()))
    plans = [compute_plan(each) for each in (plain, tied)]
    assert all(isinstance(plan, Plan) and len(plan.pipelines[0].stages) == 2 for plan in plans)
    exchange_ns = problem_of(tied).ends_meet_ns([(0, 1)])
    assert exchange_ns > 0 == problem_of(tied).ends_meet_ns([(0,), (1,)])
    assert plans[1].predicted_step_ns - plans[0].predicted_step_ns == exchange_ns
    costs = [StepModel(problem_of(each)).cost(((0, 1),)) for each in (plain, tied)]
    assert costs[1].step_ns - costs[0].step_ns == exchange_ns


ENDS = {0: b"0" * 16, 5: b"5" * 16}
TERMS = StepTerms(5, 4, 10, 10, 100, 20.0, tied_ends=(0, 5))
COUNTS = {"c": 4, "f": 4}


def said_of_ends(plan: Plan, **other: bytes) -> dict[str, Prepared]:
    """All Prepared of a step. `other`: by peer, what else it was given of the end."""
    found = {}
    for peer in plan.stage_holders():
        norms: dict[int, float] = {}
        sums: dict[int, tuple[bytes, ...]] = {}
        for number, segment in enumerate(plan.segments()):
            if peer in segment.holders:
                norms[number] = 4.0
                if len(segment.holders) > 1:
                    sums[number] = (b"s" * 16,) * len(segment.holders)
        tied = dict(ENDS) if {0, 5} & set(plan.layers_of(peer)) else {}
        lacks = other_end(plan, peer)
        if peer in other and lacks is not None:
            tied[lacks[0]] = other[peer]
        tokens = 5 * COUNTS.get(peer, 0)
        said = Prepared(GENESIS, 7, peer, norms, 1.0 * tokens, tokens, 0.0, 0, None, "base", sums)
        found[peer] = msgspec.structs.replace(said, tied=tied)
    return found


def test_what_both_ends_say_of_one_matrix_is_alike() -> None:
    plan = two_pipelines(stands_in=False)
    said = said_of_ends(plan)
    assert [fault_of(it, plan, TERMS, COUNTS) for it in said.values()] == [""] * len(said)
    assert conflict_of(said, plan, TERMS).reason == ""


def test_who_gives_another_sum_and_who_has_got_it_are_in_doubt_and_no_norm_is_compared() -> None:
    """From another sum follow another norm and another state, and nobody lies who says so."""
    plan = two_pipelines(stands_in=False)
    said = said_of_ends(plan, d=b"x" * 16)
    norms = dict.fromkeys(said["d"].squared_norms, 9.0)
    said["d"] = msgspec.structs.replace(said["d"], squared_norms=norms)
    found = conflict_of(said, plan, TERMS)
    assert set(found.doubts) == {("d", "f")} and not found.liars


def test_who_stands_in_is_in_doubt_with_each_that_has_got_another_sum() -> None:
    plan = two_pipelines(stands_in=True)
    found = conflict_of(said_of_ends(plan, a=b"x" * 16, d=b"x" * 16), plan, TERMS)
    assert set(found.doubts) == {("a", "c"), ("c", "d")} and not found.liars


def test_what_is_said_of_ends_is_what_is_due() -> None:
    plan = two_pipelines(stands_in=False)
    middle, end = said_of_ends(plan)["b"], said_of_ends(plan)["a"]
    for one, tied in ((middle, ENDS), (end, {}), (end, {0: b"0" * 16}), (end, {**ENDS, 0: b"0"})):
        assert fault_of(msgspec.structs.replace(one, tied=tied), plan, TERMS, COUNTS)
    whole = Plan((Pipeline((Stage("a", 0, 6, 1),), 0, 8),), (), 0)
    assert not states_ends(whole, "a", (0, 5)), "it gives nobody anything"
