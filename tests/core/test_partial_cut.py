"""Who goes where a line is cut between many members: the same as ever, and found by asking
little."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

import msgspec
import pytest

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.membership.eligibility import (
    earlier_doubts,
    known_accusers,
    mutually_reachable,
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
from p2p_dtfm.core.protocol.lineage import extend
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery import complete_steps
from p2p_dtfm.core.recovery.furthest_step import FurthestStep
from p2p_dtfm.core.recovery.restart_point import recover
from tests.core.builders import stated

VIEW = ViewId(3, "view")
TERMS = StepTerms(1, 1, 10, 10, 9, 20.0)
BASES = {step: f"base of step {step}" for step in range(12)}
Reached = Callable[[list[Contribution]], int]


def replicas(count: int, layers: int) -> PresentView:
    names = [f"{at:03}" for at in range(count)]
    pipelines = (Pipeline((Stage(name, 0, layers, 1),), at, 1) for at, name in enumerate(names))
    members = tuple(Member(name, 1) for name in names)
    return PresentView(VIEW, members, Plan(tuple(pipelines), (), 1))


def stages(count: int, pipelines: int) -> PresentView:
    """Stages of one layer each; so many peers hold each layer, and the rest have no stage."""
    names = [f"{at:03}" for at in range(count)]
    depth = max(1, count // pipelines)
    dealt = [
        Pipeline(tuple(Stage(names[p * depth + n], n, n + 1, 1) for n in range(depth)), p, 1)
        for p in range(pipelines)
        if (p + 1) * depth <= count
    ]
    members = tuple(Member(name, 1) for name in names)
    return PresentView(VIEW, members, Plan(tuple(dealt), (), 1))


def said_by(present: PresentView, peer_id: str, step: int, tokens: int = 1) -> Signed:
    assert present.plan is not None
    held = {n: it.holders for n, it in enumerate(present.plan.segments()) if peer_id in it.holders}
    norms = dict.fromkeys(held, 0.5)
    sums = {n: (b"a sum of 16 byte",) * len(it) for n, it in held.items() if len(it) > 1}
    prepared = Prepared(VIEW, step, peer_id, norms, 0.0, tokens, 0.0, 0, None, BASES[step], sums)
    return stated(prepared).signed


def part_of(present: PresentView, member: Member, step: int, **changes: object) -> Contribution:
    assert present.plan is not None
    held = dict.fromkeys(present.plan.layers_of(member.peer_id), step)
    counts = {it.peer_id: 1 for it in present.members}
    made = Contribution(
        member=member,
        number=5,
        record=Signed(member.peer_id, "record", b"", b""),
        present=present,
        step=step,
        held=held,
        joiners=(),
        lineages={step: BASES[step]},
        pending=PendingStep(step, BASES[step], (), tuple(held), None, counts),
    )
    return msgspec.structs.replace(made, **changes)


def between(some: Iterable[Member], others: Collection[Member]) -> set[Accusation]:
    """Each peer on one side accuses all on the other side, and the other way round."""
    pairs = [(one, other) for one in some for other in others]
    return {Accusation(*pair[::turn]) for pair in pairs for turn in (1, -1)}


def chosen_as_before(
    heard: Mapping[Member, Contribution], accusations: Collection[Accusation], reached: Reached
) -> tuple[Member, ...]:
    """The old choice: `reached` is asked about the rest, for each of those in doubt with most
    others."""
    staying = dict(heard)
    accusers, before = known_accusers(heard.values()), dict[str, set[str]]()
    for one, other in earlier_doubts(heard.values()):
        before.setdefault(one, set()).add(other)
        before.setdefault(other, set()).add(one)
    while True:
        doubts: dict[Member, set[str]] = {}
        for it in accusations:
            if it.by in staying and it.of in staying and it.by != it.of:
                doubts.setdefault(it.by, set()).add(it.of.peer_id)
                doubts.setdefault(it.of, set()).add(it.by.peer_id)
        if not doubts:
            return tuple(sorted(staying))
        rank = {}
        for member, others in doubts.items():
            of_late = before.get(member.peer_id, set())
            rank[member] = len(others | of_late), len(of_late), member.peer_id in accusers
        tied = [it for it in doubts if rank[it] == max(rank.values())]
        keys = []
        for member in tied:
            rest = [part for other, part in staying.items() if other != member]
            keys.append((reached(rest), staying[member].present is None, member))
        del staying[max(keys)[2]]


def reach_of(layer_count: int, terms: StepTerms | None) -> Callable[..., FurthestStep]:
    return partial(FurthestStep, layer_count=layer_count, terms=terms)


class Counted:
    """`reached`, which counts how often it is asked."""

    def __init__(self, layer_count: int, terms: StepTerms | None = TERMS) -> None:
        self.calls = 0
        self._recover = partial(recover, layer_count=layer_count, terms=terms)

    def __call__(self, rest: list[Contribution]) -> int:
        self.calls += 1
        target = self._recover(rest).target
        return -1 if target is None else target.step


@pytest.mark.parametrize("is_complete", (True, False))
def test_a_cut_between_replicas_asks_once_for_each_that_goes(is_complete: bool) -> None:
    present = replicas(16, 3)
    said = [said_by(present, it.peer_id, 7) for it in present.members]
    parts = {}
    for at, member in enumerate(present.members):
        mine = tuple(said if is_complete else said[at : at + 1])
        part = part_of(present, member, 7)
        assert part.pending is not None
        pending = msgspec.structs.replace(part.pending, prepared=mine if at else ())
        parts[member] = msgspec.structs.replace(part, pending=pending)
    links = between(present.members[:7], present.members[7:14])
    counted = Counted(3)
    staying = mutually_reachable(parts, links, counted, reach_of(3, TERMS))
    assert len(staying) == 9
    assert counted.calls <= 7, "of 14 at first, then of ever fewer, each for each that goes"
    assert staying == chosen_as_before(parts, links, Counted(3))


def test_where_layers_are_lost_nobody_asks_any_more() -> None:
    """Of eight stages on either side of the cut, the last holders each have a layer alone."""
    present = stages(16, 1)
    parts = {member: part_of(present, member, 7) for member in present.members}
    links = between(present.members[:8], present.members[8:])
    counted = Counted(16)
    staying = mutually_reachable(parts, links, counted, reach_of(16, TERMS))
    assert counted.calls == 0, "whoever goes takes a layer along"
    assert staying == chosen_as_before(parts, links, Counted(16))


@pytest.mark.parametrize("step, begins_anew", [(1, True), (2, False), (7, False), (11, True)])
def test_where_the_run_may_begin_anew_lost_layers_are_no_end(step: int, begins_anew: bool) -> None:
    """In the run's first steps members say what cannot be, and newcomers are all that is left."""
    present = stages(3, 1)
    parts = [part_of(present, member, step) for member in present.members]
    bound = reach_of(3, TERMS)(parts)
    assert bound.without(parts[0]) == Counted(3)(parts[1:]) == (0 if begins_anew else -1)
    newcomer = part_of(present, Member("new", 1), 0)
    newcomer = msgspec.structs.replace(newcomer, present=None, pending=None)
    alone = reach_of(3, TERMS)([parts[0], newcomer])
    assert alone.without(parts[0]) == Counted(3)([newcomer]) == 0


def test_what_most_count_is_found_as_before() -> None:
    chance = random.Random(5)
    for _ in range(300):
        few = [{name: chance.randrange(2) for name in chance.sample("abc", 2)} for _ in range(3)]
        told = [chance.choice(few) for _ in range(chance.randrange(1, 7))]
        most = max(told, key=lambda it: (told.count(it), sorted(it.items())))
        assert complete_steps._most(told) is most or complete_steps._most(told) == most
        assert [*complete_steps._most(told)] == [*most], "the first of those that are equal"


@pytest.mark.parametrize("seed", range(400))
def test_who_stays_is_who_stayed_when_all_were_asked(seed: int) -> None:
    chance = random.Random(seed)
    parts, layers = _any_parts(chance)
    members = [*parts]
    pairs = [(one, other) for one in members for other in members if one != other]
    if chance.random() < 0.5:
        at = chance.randrange(1, len(members))
        links = between(members[:at], members[at : at + chance.randrange(1, 5)])
    else:
        links = {Accusation(*it) for it in chance.sample(pairs, min(len(pairs), 12))}
    terms = chance.choice((TERMS, TERMS, None))
    counted, before = Counted(layers, terms), Counted(layers, terms)
    staying = mutually_reachable(parts, links, counted, reach_of(layers, terms))
    assert staying == chosen_as_before(parts, links, before)
    assert counted.calls <= before.calls
    bound = reach_of(layers, terms)(parts.values())
    for gone in parts.values():
        assert bound.without(gone) >= before([part for part in parts.values() if part != gone])


def _any_parts(chance: random.Random) -> tuple[dict[Member, Contribution], int]:
    """Contributions mostly of one view, a step apart; some hold what a liar may say, and some are
    newcomers'."""
    count = chance.randrange(3, 9)
    many = chance.choice((True, False))
    present = replicas(count, 2) if many else stages(count, chance.choice((1, 2)))
    assert present.plan is not None
    layers = len(present.plan.segments()) if not many else 2
    now = chance.choice((0, 1, 1, 7, 7, 7, 9, 10))
    said = {
        it.peer_id: said_by(present, it.peer_id, now, chance.choice((1, 1, 1, 1, 3)))
        for it in present.members
        if it.peer_id in present.plan.stage_holders()
    }
    silent = set(chance.sample(sorted(said), chance.choice((0, 0, 1))))
    parts = {}
    for member in present.members:
        pool = [it for peer, it in said.items() if peer not in silent]
        parts[member] = _any_part(chance, present, member, now, pool)
    for at in range(chance.choice((0, 0, 1, 2))):
        newcomer = Member(f"new {at}", 1)
        saved = (_any_saved(chance, now, layers),)
        made = part_of(present, newcomer, 0)
        parts[newcomer] = msgspec.structs.replace(made, present=None, pending=None, saved=saved)
    return parts, layers


def _any_saved(chance: random.Random, now: int, layers: int) -> SavedState:
    version = max(0, now - chance.randrange(4))
    kept = chance.sample(range(layers), chance.randrange(1, layers + 1))
    return SavedState(version, BASES[version], tuple(sorted(kept)))


def _any_part(
    chance: random.Random, present: PresentView, member: Member, now: int, said: list[Signed]
) -> Contribution:
    layers = max(1, len(present.plan.segments()) if present.plan else 1)
    told = tuple(it for it in said if chance.random() < 0.8)
    part = part_of(present, member, now)
    assert part.pending is not None
    reduced = part.pending.reduced_layers if chance.random() < 0.9 else ()
    pending = msgspec.structs.replace(part.pending, prepared=told, reduced_layers=reduced)
    changes: dict[str, object] = {
        "pending": pending,
        "saved": tuple(_any_saved(chance, now, layers) for _ in range(chance.choice((0, 0, 1)))),
        "cuts": tuple(_any_saved(chance, now, layers) for _ in range(chance.choice((0, 0, 0, 1)))),
        "accepts_loss": chance.random() < 0.2,
        "may_repeat": chance.choice((0, 0, 0, 2, 9)),
    }
    kind = chance.random()
    if kind < 0.15:  # this peer has committed the step
        outcome = StepOutcome(now, 1.0, 0.0, len(said), None, None)
        after = extend(BASES[now], now, VIEW, outcome.digest)
        retained = RetainedStep(VIEW, now, BASES[now], outcome, (*part.held,), told)
        changes |= {"step": now + 1, "held": dict.fromkeys(part.held, now + 1)}
        changes |= {"lineages": {now + 1: after}, "retained": retained, "pending": None}
    elif kind < 0.25:  # this peer's view is another one, with or without a plan
        plan = present.plan if chance.random() < 0.5 else None
        changes["present"] = PresentView(ViewId(1, "older"), present.members, plan)
    elif kind < 0.35:  # this peer guards what others have, or says so
        version = chance.choice((now, 11))
        changes |= {"held": dict.fromkeys(range(layers), version), "step": version}
        changes["lineages"] = {version: BASES[version]}
    elif kind < 0.4:
        changes |= {"held": {}, "lineages": {}}
    return msgspec.structs.replace(part, **changes)
