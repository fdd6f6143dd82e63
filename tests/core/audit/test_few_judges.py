"""Where audits prove nothing by themselves: works that one other member or none can compute again,
and layers that nobody else has."""

import time

from p2p_dtfm.core.audit.judging import few_judges, only_holders
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from tests.core.audit.parts import PLAN, two_by_two


def test_of_replicas_each_has_three_judges() -> None:
    assert few_judges(PLAN) == {}


def test_in_pipelines_members_judge_by_parameters_that_they_are_given() -> None:
    assert few_judges(two_by_two()) == {} and only_holders(two_by_two()) == []
    only_two = Plan((Pipeline((Stage("a", 0, 1, 1), Stage("b", 1, 3, 1)), 0, 2),), (), 1)
    assert few_judges(only_two) == dict.fromkeys("ab", 1)
    assert only_holders(only_two) == ["a", "b"], "what their layers are is their word"


def test_who_computes_otherwise_judges_nobody() -> None:
    holders = PLAN.stage_holders()
    first = holders[0]
    same = dict.fromkeys(holders, "cpu-1")
    assert few_judges(PLAN, same) == {}
    assert few_judges(PLAN, {**same, first: "cpu-2"}) == {first: 0}
    assert few_judges(PLAN, {**same, first: ""}) == {first: 0}, "a device that repeats no bits"
    unlike = {peer: f"cpu-{number}" for number, peer in enumerate(holders)}
    assert few_judges(PLAN, unlike) == dict.fromkeys(holders, 0)
    assert few_judges(PLAN, {first: "cpu-1"}) == {}, "of the others nothing is known yet"


def test_of_four_hundred_it_is_found_at_once() -> None:
    """A page and a terminal ask this each second, on the member's own event loop. It took eight
    seconds."""
    pipelines = tuple(
        Pipeline((Stage(f"{n:03}-a", 0, 1, 1), Stage(f"{n:03}-b", 1, 2, 1)), 2 * n, 2)
        for n in range(200)
    )
    plan = Plan(pipelines, (), 1)
    names = plan.stage_holders()
    known = {it: f"cpu-{n % 100}" for n, it in enumerate(names[:399])}
    begun_s = time.process_time()
    assert few_judges(plan, known) == {} == few_judges(plan)
    odd = {**known, names[5]: "cpu-x", names[6]: ""}
    assert few_judges(plan, odd, 2) == {names[5]: 1, names[6]: 0}
    assert few_judges(plan, None, 1) == dict.fromkeys(names, 0), "nothing is kept of the second"
    assert time.process_time() - begun_s < 2.0
