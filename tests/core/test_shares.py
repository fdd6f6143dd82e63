"""Who has computed how much: the shares of a step add up to all of it, whatever happens between."""

import random

from p2p_dtfm.core.commit.shares import SPANS_KEPT, Tallies, shares_of
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from tests.core.planning import Peer, snapshot

TOKENS = 64


def test_the_shares_of_a_plan_are_all_of_a_step() -> None:
    for count in (1, 3, 7):
        shot = snapshot([Peer(block_ns=1_000_000 * (n + 1)) for n in range(count)])
        plan = compute_plan(shot)
        assert isinstance(plan, Plan)
        shares = shares_of(plan, TOKENS)
        work = shot.workload
        assert sum(shares.values()) == TOKENS * work.microbatch_count * work.layer_count
        assert set(shares) == set(plan.stage_holders())


def test_tallies_add_up_to_what_is_committed_whatever_fails() -> None:
    """Views come and go, steps are given up and done again, a last step is told late."""
    chance, step, tallies = random.Random(7), 0, Tallies()
    late: int | None = None
    for _ in range(400):
        step = max(0, step - chance.choice((0, 0, 0, 1, 5)))
        names = chance.sample("abcdefg", chance.randint(1, 4))
        shares = dict.fromkeys(names[1:], 10) | {names[0]: 100 - 10 * len(names[1:])}
        if chance.random() < 0.3 and step and tallies.spans[-1].end_step == step:
            late, tallies.spans[-1].end_step = step - 1, step - 1
        tallies.view_took_over(step, shares)
        if late is not None:
            tallies.committed(late)
            late = None
        for _ in range(chance.randint(0, 9)):
            tallies.committed(step)
            step += 1
        assert tallies.step_count == step
        assert sum(tallies.board().values()) == 100 * step
        assert len(tallies.spans) <= SPANS_KEPT


def test_old_spans_become_one_sum() -> None:
    tallies = Tallies()
    for step in range(SPANS_KEPT + 40):
        tallies.view_took_over(step, {"a": 1, "b": 2})
        tallies.committed(step)
    assert len(tallies.spans) == SPANS_KEPT and tallies.steps_before == 40
    assert tallies.board() == {"a": SPANS_KEPT + 40, "b": 2 * (SPANS_KEPT + 40)}


def test_what_was_not_seen_is_not_counted() -> None:
    tallies = Tallies()
    tallies.view_took_over(0, {"a": 1})
    tallies.committed(0)
    tallies.view_took_over(10, {"a": 1})
    tallies.committed(10)
    assert tallies.step_count == 2 and tallies.board() == {"a": 2}
