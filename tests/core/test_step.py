"""A step commits with every Prepared, to one outcome in whatever order they come; liars are
named."""

import builtins
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.commit.ledger import STEPS_AHEAD_LIMIT, Ledger
from p2p_dtfm.core.commit.step import StepTransaction
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.schedule.sums_in_order import added_up
from tests.core.builders import stated

VIEW = ViewId(3, "ab" * 32)
NEXT = ViewId(4, "cd" * 32)
# two pipelines, of two stages and of one: segments (0-1: a, c) and (2-5: b, c)
PLAN = Plan(
    (
        Pipeline((Stage("a", 0, 2, 2), Stage("b", 2, 6, 1)), 0, 3),
        Pipeline((Stage("c", 0, 6, 1),), 3, 1),
    ),
    ("spare",),
    1,
)
SEGMENTS = {"a": (0,), "b": (1,), "c": (0, 1)}


def prepared(peer: str, step: int = 0, **changes: object) -> Prepared:
    has_head = peer in "bc"
    values: dict[str, object] = {
        "view": VIEW,
        "step": step,
        "peer_id": peer,
        "squared_norms": {number: 0.1 * (number + 1) for number in SEGMENTS[peer]},
        "loss_sum": {"b": 30.3, "c": 10.1}.get(peer, 0.0),
        "token_count": {"b": 30, "c": 10}[peer] if has_head else 0,
        "held_out_loss_sum": 0.0,
        "held_out_token_count": 0,
        "ready_for": None,
    }
    return Prepared(**(values | changes))  # type: ignore[arg-type]


def commit(*statements: Prepared):
    transaction = StepTransaction(VIEW, 0, PLAN)
    for statement in statements:
        assert transaction.outcome() is None, "not before all have spoken"
        transaction.record(stated(statement))
    return transaction.outcome()


def test_it_commits_with_the_last_prepared_and_not_before() -> None:
    transaction = StepTransaction(VIEW, 0, PLAN)
    for number, peer in enumerate("cab"):
        assert transaction.outcome() is None
        assert transaction.missing == tuple(sorted("cab"[number:]))
        transaction.record(stated(prepared(peer)))
    outcome = transaction.outcome()
    assert outcome is not None and transaction.missing == ()
    assert outcome.loss == pytest.approx(40.4 / 40)
    assert outcome.gradient_norm == pytest.approx(math.sqrt(0.1 + 0.2))
    assert outcome.token_count == 40
    assert outcome.held_out_loss is None


numbers = st.floats(min_value=0, max_value=1e30)


@given(
    st.permutations("abc"),
    st.fixed_dictionaries({peer: st.tuples(numbers, numbers, numbers) for peer in "abc"}),
)
def test_the_outcome_is_bitwise_equal_in_any_order_of_arrival(order: list, facts: dict) -> None:
    def said(peer: str) -> Prepared:
        loss = facts[peer][2]
        norms = {number: facts["c"][number] for number in SEGMENTS[peer]}
        return prepared(
            peer, squared_norms=norms, loss_sum=loss, held_out_loss_sum=loss, held_out_token_count=3
        )

    assert commit(*map(said, order)) == commit(*map(said, "abc"))


def test_the_norm_is_that_of_all_segments() -> None:
    outcome = commit(
        prepared("a", squared_norms={0: 4.0}),
        prepared("b", squared_norms={1: 5.0}),
        prepared("c", squared_norms={0: 4.0, 1: 5.0}),
    )
    assert outcome is not None and outcome.gradient_norm == 3.0


def test_a_step_without_tokens_has_no_loss() -> None:
    silent = {"loss_sum": 0.0, "token_count": 0}
    outcome = commit(*(prepared(peer, **silent) for peer in "abc"))
    assert outcome is not None and outcome.loss is None


@pytest.mark.parametrize(
    "ready, take_over",
    [((NEXT, NEXT, NEXT), NEXT), ((NEXT, None, NEXT), None), ((None, None, None), None)],
)
def test_the_next_view_takes_over_only_if_all_are_ready_for_it(ready: tuple, take_over) -> None:
    statements = (prepared(p, ready_for=r) for p, r in zip("abc", ready, strict=True))
    outcome = commit(*statements)
    assert outcome is not None and outcome.take_over == take_over


@pytest.mark.parametrize(
    "changes, cause",
    [
        ({"peer_id": "spare"}, "without a stage"),
        ({"peer_id": "stranger"}, "without a stage"),
        ({"loss_sum": math.nan}, "not finite"),
        ({"held_out_loss_sum": math.inf}, "not finite"),
        ({"squared_norms": {0: math.nan}}, "not finite"),
        ({"squared_norms": {0: -math.inf}}, "not finite"),
        ({"squared_norms": {0: -1.0}}, "negative"),
        ({"squared_norms": {}}, "norms of its segments"),
        ({"squared_norms": {1: 1.0}}, "norms of its segments"),
        ({"squared_norms": {0: 1.0, 1: 1.0}}, "norms of its segments"),
        ({"token_count": -1}, "negative"),
        ({"held_out_token_count": -1}, "negative"),
    ],
    ids=str,
)
def test_what_cannot_be_true_is_the_senders_fault(changes: dict, cause: str) -> None:
    transaction = StepTransaction(VIEW, 0, PLAN)
    with pytest.raises(PeerFault, match=cause) as caught:
        transaction.record(stated(prepared("a", **changes)))
    assert caught.value.peer_id == changes.get("peer_id", "a")
    assert transaction.missing == ("a", "b", "c"), "nothing of it is kept"


def test_the_same_statement_twice_is_no_fault_and_another_one_is() -> None:
    transaction = StepTransaction(VIEW, 0, PLAN)
    transaction.record(stated(prepared("a")))
    transaction.record(stated(prepared("a")))
    with pytest.raises(PeerFault, match="two different"):
        transaction.record(stated(prepared("a", loss_sum=1.0)))
    transaction.record(stated(prepared("b")))
    transaction.record(stated(prepared("c")))
    assert transaction.outcome() == commit(*map(prepared, "abc"))


# the ledger ----------------------------------------------------------------------------------


def test_a_ledger_gives_outcomes_in_order() -> None:
    ledger = Ledger(VIEW, PLAN, 7)
    for peer in "ab":
        ledger.record(stated(prepared(peer, 8)))
    for peer in "abc":
        assert ledger.next_outcome() is None
        ledger.record(stated(prepared(peer, 7)))
    outcome = ledger.next_outcome()
    assert outcome is not None and outcome.step == 7
    assert ledger.next_outcome() is None and ledger.missing == ("c",)
    ledger.record(stated(prepared("c", 8)))
    outcome = ledger.next_outcome()
    assert outcome is not None and outcome.step == 8
    assert ledger.step == 9


def test_a_late_prepared_of_a_committed_step_is_ignored() -> None:
    ledger = Ledger(VIEW, PLAN, 7)
    ledger.record(stated(prepared("a", 6)))
    ledger.record(stated(prepared("a", 6, loss_sum=99.0)))
    assert ledger.missing == ("a", "b", "c")


@pytest.mark.parametrize("ahead", [STEPS_AHEAD_LIMIT, 1 << 60])
def test_a_step_too_far_ahead_is_a_fault_and_takes_no_memory(ahead: int) -> None:
    ledger = Ledger(VIEW, PLAN, 7)
    with pytest.raises(PeerFault, match="while step 7 is not committed"):
        ledger.record(stated(prepared("a", 7 + ahead)))
    assert not ledger._transactions


def test_another_view_is_a_fault_even_under_the_same_number() -> None:
    ledger = Ledger(VIEW, PLAN, 0)
    for view in (NEXT, msgspec.structs.replace(VIEW, snapshot="00" * 32)):
        with pytest.raises(PeerFault, match="Prepared of view"):
            ledger.record(stated(prepared("a", view=view)))


@given(st.permutations([(peer, step) for peer in "abc" for step in (0, 1)]))
def test_two_steps_interleaved_in_any_order_commit_alike(order: list) -> None:
    ledger = Ledger(VIEW, PLAN, 0)
    outcomes = []
    for peer, step in order:
        ledger.record(stated(prepared(peer, step)))
        while (outcome := ledger.next_outcome()) is not None:
            outcomes.append(outcome)
    assert [outcome.step for outcome in outcomes] == [0, 1]
    assert outcomes[0].loss == outcomes[1].loss


def test_sums_are_rounded_one_after_the_other_whichever_python_adds_them_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From Python 3.12 on `sum` makes up for what is rounded away, and members came to other
    norms."""
    monkeypatch.setattr(builtins, "sum", math.fsum)
    said = prepared("c", loss_sum=0.1, squared_norms={0: 1.0, 1: 2.0**-53})
    others = (
        prepared("a", loss_sum=0.0, squared_norms={0: 1.0}),
        prepared("b", loss_sum=0.2, squared_norms={1: 2.0**-53}),
    )
    outcome = commit(*others, said)
    assert outcome is not None and outcome.loss == (0.2 + 0.1) / 40
    assert added_up([0.1] * 10) == 0.9999999999999999 != math.fsum([0.1] * 10)
    assert added_up([]) == 0.0
