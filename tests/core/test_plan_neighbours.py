"""To whom a member of a swarm of many listens by the plan."""

from p2p_dtfm.core.consensus.overlay.plan_neighbours import plan_neighbours
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage


def plan_of(*pipelines: str) -> Plan:
    """A plan of stages with one layer each; a pipeline of one peer holds both layers."""
    made = []
    for number, names in enumerate(pipelines):
        ends = (1, 2) if len(names) == 2 else (2,)
        stages = [Stage(n, e - 2 // len(names), e, 1) for n, e in zip(names, ends, strict=True)]
        made.append(Pipeline(tuple(stages), number, 1))
    return Plan(tuple(made), (), 1)


def test_stages_beside_its_own_and_all_with_whom_it_adds_up() -> None:
    plan = plan_of("ab", "cd", "e")
    assert plan_neighbours(plan, "a") == set("bce")
    assert plan_neighbours(plan, "d") == set("bce")
    assert plan_neighbours(plan, "e") == set("abcd")
    assert plan_neighbours(plan, "x") == frozenset()
    assert plan_neighbours(NoPlan("too few"), "a") == frozenset()


def test_who_is_listened_to_listens() -> None:
    """Each owes the other something directly, and a peer that owes is heard
    (`core.liveness.stalls`)."""
    names = [chr(0x100 + number) for number in range(60)]
    pairs = ["".join(names[at : at + 2]) for at in range(0, 40, 2)]
    plan = plan_of(*pairs[:10], *names[40:50], *pairs[10:], *names[50:])
    found = {name: plan_neighbours(plan, name) for name in names}
    assert all(one in found[other] for one, near in found.items() for other in near)
    segments = plan.segments()
    assert all(set(s.holders) - {one} <= found[one] for s in segments for one in s.holders)
