"""Whom a member of a swarm of many listens to by the plan."""

from p2p_dtfm.core.consensus.overlay.plan_neighbours import NEXT_PIPELINES, plan_neighbours
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage


def plan_of(*pipelines: str) -> Plan:
    """Of stages with one layer each, but that a pipeline of one has both."""
    made = []
    for number, names in enumerate(pipelines):
        ends = (1, 2) if len(names) == 2 else (2,)
        stages = [Stage(n, e - 2 // len(names), e, 1) for n, e in zip(names, ends, strict=True)]
        made.append(Pipeline(tuple(stages), number, 1))
    return Plan(tuple(made), (), 1)


def test_few_pipelines_listen_to_all_that_they_add_up_with() -> None:
    plan = plan_of("ab", "cd", "e")
    assert plan_neighbours(plan, "a") == set("bce")
    assert plan_neighbours(plan, "d") == set("bce")
    assert plan_neighbours(plan, "e") == set("abcd")
    assert plan_neighbours(plan, "x") == frozenset()
    assert plan_neighbours(NoPlan("too few"), "a") == frozenset()


def test_of_many_some_in_a_ring() -> None:
    names = [chr(0x100 + number) for number in range(100)]
    plan = plan_of(*names)
    found = {name: plan_neighbours(plan, name) for name in names}
    assert all(len(near) == 2 * NEXT_PIPELINES for near in found.values())
    assert all(one in found[other] for one, near in found.items() for other in near)
    assert found[names[0]] == {names[at] for at in (1, 2, 3, 4, 96, 97, 98, 99)}


def test_unlike_stages_listen_to_each_other_or_neither_does() -> None:
    names = [chr(0x100 + number) for number in range(60)]
    pairs = ["".join(names[at : at + 2]) for at in range(0, 40, 2)]
    plan = plan_of(*pairs[:10], *names[40:50], *pairs[10:], *names[50:])
    found = {name: plan_neighbours(plan, name) for name in names}
    assert all(one in found[other] for one, near in found.items() for other in near)
    assert all(near for near in found.values())
