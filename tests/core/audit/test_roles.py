"""In a run with audits a new key waits, then works beside others, and then is established."""

import msgspec
import pytest

from p2p_dtfm.core.audit.claim_book import ClaimBook
from p2p_dtfm.core.audit.draw import drawn_watched, seed_of
from p2p_dtfm.core.audit.roles import (
    NEW,
    RETURN_STEPS,
    WATCHED_STEPS,
    alone,
    comes_of_age,
    on_probation,
    watched,
    with_roles,
    without_stage_yet,
)
from p2p_dtfm.core.consensus.attempts.chosen import Chosen, chosen_of
from p2p_dtfm.core.membership.bars import BARS_LIMIT, barred_at, united
from p2p_dtfm.core.messages.agreement_messages import Contribution, PendingStep
from p2p_dtfm.core.planner.explain import explain, spare_in_short
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Member, Snapshot
from tests.core.audit.parts import NAMES, PLAN, VIEW, step_of
from tests.core.audit.test_bars import BAR, HONEST, MEMBERS, TERMS, all_find, part
from tests.core.audit.test_draw import claimed
from tests.core.builders import stated
from tests.core.planning import Peer, name_of, snapshot

FOLLOW = 50
ROLES = msgspec.structs.replace(TERMS, follow_steps=FOLLOW)


def known(peer_id: str, until_step: int = 0) -> Bar:
    return Bar(GENESIS, 0, peer_id, 0, until_step, NEW)


def chosen(parts: list[Contribution], follow_steps: int = FOLLOW) -> Chosen:
    terms = msgspec.structs.replace(TERMS, follow_steps=follow_steps)
    return chosen_of({it.member: it for it in parts}, terms, (), lambda rest: 7)


def joins(name: str) -> Contribution:
    return part(name, step=0, present=None, held={}, lineages={})


def test_those_with_whom_a_run_begins_are_established() -> None:
    found = chosen([joins(name) for name in NAMES]).bars
    assert [bar.peer_id for bar in found] == sorted(NAMES)
    assert not watched(found, 0) and not on_probation(found, 0)


def test_who_comes_while_training_is_under_way_follows_and_members_do_not() -> None:
    found = chosen([*(part(name) for name in NAMES), joins("e")])
    assert Member("e", 1) in found.participants
    assert on_probation(found.bars, 7) == {"e": 7 + FOLLOW}
    assert on_probation(found.bars, 7 + FOLLOW) == {}
    assert watched(found.bars, 7 + FOLLOW) == {"e"}
    assert not watched(found.bars, 7 + FOLLOW + WATCHED_STEPS)
    assert not barred_at(found.bars, 7), "it has a place"
    again = [part(name, found.bars) for name in (*NAMES, "e")]
    assert chosen(again).bars == found.bars, "the next view counts from the same step"


def test_without_audits_or_by_the_founders_wish_newcomers_are_like_all_others() -> None:
    assert chosen([*(part(name) for name in NAMES), joins("e")], 0).bars == ()


def test_nobody_is_established_by_its_own_word() -> None:
    """The word of half of the members establishes nobody either."""
    parts = [part(name, (known("e"),) if name in "ab" else ()) for name in NAMES]
    early = msgspec.structs.replace(joins("e"), bars=(known("e"),))
    assert on_probation(chosen([*parts, early]).bars, 7) == {"e": 7 + FOLLOW}
    parts = [part(name, (known("e"),) if name in "abd" else ()) for name in NAMES]
    assert not on_probation(chosen([*parts, joins("e")]).bars, 7), (
        "it is known to most: it was away"
    )


def test_a_verdict_ends_what_was_known_and_each_makes_the_wait_longer() -> None:
    over = united([known("c"), BAR])
    assert over == (BAR,) and barred_at(over, 7).keys() == {"c"}
    assert on_probation(over, BAR.until_step)["c"] == BAR.until_step + RETURN_STEPS
    twice = msgspec.structs.replace(BAR, count=2)
    assert on_probation([twice], BAR.until_step)["c"] == BAR.until_step + 2 * RETURN_STEPS
    often = msgspec.structs.replace(BAR, count=1 << 20)
    assert on_probation([often], BAR.until_step)["c"] < 1 << 62


def test_many_new_keys_have_no_verdict_forgotten() -> None:
    keys = [known(f"key-{number}", 10_000 + number) for number in range(2 * BARS_LIMIT)]
    assert BAR in united([*keys, BAR])


def later_keys(count: int) -> list[Bar]:
    """Keys that came after "x" did, and are gone."""
    return [known(f"key-{number:03}", 58 + number) for number in range(count)]


def test_who_is_new_is_not_forgotten_for_keys_that_came_later_and_are_gone() -> None:
    """A peer without an entry among the members counts as established. A liar would have colluders
    follow it until it had no entry, and would at once hold layers by itself."""
    bars = (known("x", 57), *later_keys(BARS_LIMIT - 1))
    names = (*NAMES, "x")
    for number in range(2):
        found = chosen([*(part(name, bars) for name in names), joins(f"late-{number}")])
        assert "x" in watched(found.bars, 7) and len(found.bars) == BARS_LIMIT
        bars = found.bars
    assert "x" in watched(chosen([part(name, bars) for name in names]).bars, 7)


def test_a_view_has_nobody_that_is_in_it_forgotten() -> None:
    """What a member knows besides is of peers that are elsewhere."""
    x = known("x", 57)
    assert x in united((*later_keys(BARS_LIMIT), x), {"x"}) != united((*later_keys(BARS_LIMIT), x))
    verdicts = [Bar(VIEW, 7, f"p{n:03}", 1, 407, "") for n in range(BARS_LIMIT)]
    assert united((*verdicts, x), {"x"}) == tuple(verdicts), "verdicts outlive what is only known"


def test_verdicts_have_nobody_that_is_in_the_view_forgotten() -> None:
    parts = [part(name, (known("x", 57), *later_keys(BARS_LIMIT - 1))) for name in (*NAMES, "x")]
    signed = tuple(stated(it).signed for it in step_of(HONEST, all_find("c")).values())
    pending = PendingStep(7, "", signed, (0, 1, 2), counts=dict.fromkeys(NAMES, 2))
    found = chosen([msgspec.structs.replace(it, pending=pending) for it in parts])
    assert barred_at(found.bars, 7).keys() == {"c"} and "x" in watched(found.bars, 7)


def test_where_nobody_remembers_anything_all_are_established() -> None:
    assert not watched(with_roles((), (), ("a", "b"), 90, FOLLOW), 90)
    some = with_roles((known("a"),), (), ("a", "b"), 90, FOLLOW)
    assert on_probation(some, 90) == {"b": 90 + FOLLOW}, "a's disk knows that b was not there"


def test_who_is_watched_is_audited_in_a_fifth_of_the_steps_beside_the_draw() -> None:
    seeds = [seed_of("1:ab", step, {}) for step in range(2000)]
    drawn = [drawn_watched(seed, {"c"}) for seed in seeds]
    assert 0.18 < sum(map(bool, drawn)) / len(seeds) < 0.22
    book = ClaimBook(VIEW, PLAN, 0, bars=(known("c", 1),))
    audited = set()
    for step in range(7, 67):
        claimed(book, step)
        audited |= set() if step == 7 else set(book.drawn())  # in a view's first step all are
    assert audited == {"c"}
    settled = ClaimBook(VIEW, PLAN, 0, bars=(known("c", 0),))
    claimed(settled, 7)
    claimed(settled, 8)
    assert settled.drawn() == {}


def swarm(*bars: Bar, present: Plan | None = None, step: int = 100) -> Snapshot:
    """A swarm of three, two of which have memory for the model together; all are linked."""
    peers = [Peer(memory_bytes=200 << 20)] * 3
    found = snapshot(peers, present=present)
    return msgspec.structs.replace(found, bars=bars, step=step)


def places(found: Snapshot) -> dict[str, range]:
    plan = compute_plan(found)
    assert isinstance(plan, Plan), plan
    return {peer: plan.layers_of(peer) for peer in plan.stage_holders()}


def test_who_follows_has_no_stage_and_explain_says_until_when() -> None:
    assert len(places(swarm())) == 3
    found = swarm(known(name_of(2), 120))
    assert set(places(found)) == {name_of(0), name_of(1)}
    plan = compute_plan(found)
    assert isinstance(plan, Plan)
    told = [line.role for line in explain(found, plan).peers if line.peer_id == name_of(2)]
    assert told == ["spare: it is new here, and follows until step 120"]
    two = swarm(known(name_of(1), 120), known(name_of(2), 120))
    assert len(places(two)) > 1, "else there is no plan"


def test_who_follows_for_longer_for_verdicts_is_told_so_and_whether_the_run_ends_before() -> None:
    """The follower was told that it is new, and told of a step that may never come."""
    me = name_of(2)
    found = swarm(msgspec.structs.replace(known(me, 1240), step=90))
    short = "new in a run that audits work, it follows until step 1,240"
    assert spare_in_short(found, me, 100) == short
    assert spare_in_short(found, me, 100, 1150, 2000) == short
    longer = f"{short}, for longer as others were barred"
    assert spare_in_short(found, me, 100, 50, 2000) == longer
    assert spare_in_short(found, me, 100, 50, 1240) == longer
    assert spare_in_short(found, me, 100, 50, 1239) == f"{longer}; the run ends before that"


def test_who_is_watched_gets_no_layers_that_it_alone_would_hold() -> None:
    watched_now = known(name_of(2), 60)
    held = places(swarm(watched_now))
    established = {n for peer, layers in held.items() if peer != name_of(2) for n in layers}
    assert set(held.get(name_of(2), range(0))) <= established
    assert len(places(swarm(known(name_of(2), 60), step=60 + WATCHED_STEPS))) == 3


def test_who_has_a_stage_keeps_it_though_its_fellow_is_gone() -> None:
    """The states of this holder are then the only ones."""
    stages = (Stage(name_of(0), 0, 7, 1), Stage(name_of(2), 7, 14, 1))
    present = Plan((Pipeline(stages, 0, 64),), (name_of(1),), 1)
    found = swarm(known(name_of(2), 60), present=present)
    assert not alone(found, present) and not without_stage_yet(found)


def test_a_plan_is_asked_for_when_somebody_comes_of_age() -> None:
    found = swarm(known(name_of(2), 120))
    assert not comes_of_age(found, name_of(2), 119) and comes_of_age(found, name_of(2), 120)
    later = msgspec.structs.replace(found, step=120)
    assert not comes_of_age(later, name_of(2), 419) and comes_of_age(later, name_of(2), 420)
    assert not comes_of_age(later, name_of(0), 420)


@pytest.mark.parametrize(("founders", "newcomers"), [(2, 1), (2, 2), (2, 3), (3, 3)])
def test_newcomers_in_pipelines_get_a_stage_in_time(founders: int, newcomers: int) -> None:
    """The best plan gives newcomers layers that no founder holds. Where only time with a stage
    established them, they never got one."""
    memory_bytes = (200 if founders == 2 else 150) << 20
    peers = [Peer(memory_bytes=memory_bytes)] * (founders + newcomers)
    early = {name_of(n) for n in range(founders)}
    bars = tuple(known(name_of(n), 60) for n in range(founders, len(peers)))
    plan = compute_plan(snapshot(peers[:founders]))
    for step in (59, 60, 60 + WATCHED_STEPS):
        assert isinstance(plan, Plan) and set(plan.stage_holders()) == early
        found = snapshot(peers, present=plan)
        plan = compute_plan(msgspec.structs.replace(found, bars=bars, step=step))
    best = compute_plan(snapshot(peers))
    assert isinstance(plan, Plan) and isinstance(best, Plan)
    assert plan.predicted_step_ns == best.predicted_step_ns
    assert set(plan.stage_holders()) > early


def test_that_a_key_has_no_stage_is_no_reason_to_remember_its_verdict_for_longer() -> None:
    bars = [Bar(VIEW, n, f"p{n:03}", 1, 400 + n, "") for n in range(BARS_LIMIT + 1)]
    first = msgspec.structs.replace(bars[0], until_step=90_000)
    assert {it.peer_id for it in united((first, *bars[1:]))} == {it.peer_id for it in bars[1:]}


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_members_from_before_roles_are_established(name: str) -> None:
    assert not watched(chosen([part(it) for it in NAMES]).bars, 7), name
