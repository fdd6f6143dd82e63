"""Where audits prove nothing by themselves: layers that one other member has, or none."""

from p2p_dtfm.core.audit.work import few_judges
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from tests.core.audit.parts import PLAN, two_by_two


def test_of_replicas_each_has_three_judges() -> None:
    assert few_judges(PLAN) == {}


def test_two_pipelines_of_two_have_one_judge_for_each() -> None:
    assert few_judges(two_by_two()) == dict.fromkeys("abcd", 1)


def test_who_has_more_layers_judges_and_who_has_fewer_does_not() -> None:
    whole = Pipeline((Stage("a", 0, 3, 1),), 0, 2)
    halves = Pipeline((Stage("b", 0, 1, 1), Stage("c", 1, 3, 1)), 2, 2)
    assert few_judges(Plan((whole, halves), (), 1)) == {"a": 0, "b": 1, "c": 1}


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
