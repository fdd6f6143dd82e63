"""Who has computed how much: the shares of a step add up to all of it, whatever happens between."""

import random
from collections import Counter

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
    """Views come and go, steps are given up and done again, and a last step is told late."""
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
    tallies.committed(9)  # whoever has committed it: it is rolled forward here
    assert tallies.step_count == 2 and tallies.board() == {"a": 2}


def test_steps_that_others_prove_are_counted_once_each() -> None:
    """A peer has seen parts of a history, some of them as they did not stay."""
    for seed in range(60):
        chance, truth, seen = random.Random(seed), list[dict[str, int]](), Tallies()
        while len(truth) < 60:
            shares = {chance.choice("abc"): 60, chance.choice("def"): 40}
            seen_here = chance.random() < 0.6
            if seen_here:
                wrong = chance.random() < 0.2
                seen.view_took_over(len(truth), {"z": 100} if wrong else shares)
            for _ in range(chance.randint(1, 9)):
                if seen_here:
                    seen.committed(len(truth))
                truth.append(shares)
        now = len(truth)
        seen.view_took_over(now, {"a": 100})
        seen.settle(dict(enumerate(truth)))
        seen.committed(now)
        board = Counter[str]({"a": 100})
        for shares in truth:
            board.update(shares)
        assert seen.board() == board and seen.step_count == now + 1 == seen.known_before(now + 1)
        firsts = [span.first_step for span in seen.spans]
        assert firsts == sorted(firsts)


def test_a_proof_changes_nothing_of_what_is_one_sum_by_now() -> None:
    tallies = Tallies()
    for step in range(SPANS_KEPT + 40):
        tallies.view_took_over(step, {"ab"[step % 2]: 1})
        tallies.committed(step)
    before = tallies.board()
    tallies.settle({step: {"c": 1} for step in range(SPANS_KEPT + 40)})
    assert tallies.step_count == SPANS_KEPT + 40
    assert tallies.board() == {"a": 20, "b": 20, "c": SPANS_KEPT} and sum(before.values()) == 552
