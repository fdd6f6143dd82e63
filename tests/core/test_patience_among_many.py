"""In a view of many members on a slow machine nobody is hasty. A view that comes before the first
step, and an attempt that is given up too soon, make such members slow."""

import copy
from dataclasses import replace

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, AgreementTiming
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.patience import patience_ns
from p2p_dtfm.core.consensus.attempts.wide import Wide
from p2p_dtfm.core.consensus.parts.opening import FIRST_STEP_NS, due_verdict
from p2p_dtfm.core.consensus.parts.syncing import STEPS_AHEAD, Syncing
from p2p_dtfm.core.consensus.parts.wide.telling import Telling
from p2p_dtfm.core.consensus.present import Present
from p2p_dtfm.core.liveness.lateness import Lateness, of_many_ns
from p2p_dtfm.core.messages.agreement_messages import Active, PresentView, open_contribution
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.core.recovery.view import View
from tests.core.builders import WORKLOAD, record
from tests.core.liars import contribution, evil_record

A = Member("a", 1)


@pytest.fixture
def state(three: AgreementState) -> AgreementState:
    """The state of `a`, in a view with `b` and `c` that has just begun."""
    state = copy.deepcopy(three)
    said = msgspec.structs.replace(state.present.said_active, step=state.step)
    state.present.said_active = said
    state.present.taken_over_ns = state.present.committed_ns = 10 * SECOND_NS
    state.attempts.quiet_until_ns = 0
    return state


@pytest.mark.parametrize("wide_above", [2, 3])
def test_of_many_the_first_step_goes_before_newcomers(
    state: AgreementState, wide_above: int
) -> None:
    state.settings.timing = replace(state.timing, wide_above=wide_above)
    state.others.newcomers.ask(record("evil"), evil_record(), 0)
    waits = due_verdict(state, 12 * SECOND_NS)
    assert waits.opens == (wide_above == 3), "three are more than two"
    if wide_above == 2:
        assert waits.reason == "of a view of many the first step goes before newcomers"
        state.intent = Intent.LEAVING
        assert due_verdict(state, 12 * SECOND_NS).reason == "a leaves", "for that nobody waits"
        state.intent = Intent.TRAIN
    assert due_verdict(state, 10 * SECOND_NS + FIRST_STEP_NS).opens, "not for ever"
    earlier = msgspec.structs.replace(state.present.said_active, step=state.step - 1)
    state.present.said_active = earlier
    assert due_verdict(state, 12 * SECOND_NS).opens, "it is committed"


def test_each_attempt_of_many_after_a_failed_one_has_twice_the_time() -> None:
    def times(number: int, view_number: int, is_wide: bool = True, is_member: bool = True) -> int:
        attempt = Attempt(A, number, number % 2 == 0, GENESIS, WORKLOAD.layer_count)
        present = PresentView(ViewId(view_number, "f" * 64), (A,), None)
        part = contribution(number, present, A)
        attempt.add(part, open_contribution(part, lambda *_: True))
        attempt.next_round()
        attempt.passed_on.wide = Wide() if is_wide else None
        takes_ns = patience_ns(attempt, AgreementTiming(), is_member, Lateness(), view_number)
        return takes_ns // AgreementTiming().gather_ns

    for first, view_number in ((1, 0), (3, 1), (2, 1), (3, 2), (4, 2)):
        numbers = [first, first + 2, first + 4, first + 6, first + 1000]
        assert [times(number, view_number) for number in numbers] == [1, 2, 4, 4, 4]
        assert {times(number, view_number, is_wide=False) for number in numbers} == {1}
    assert times(1001, 0, is_member=False) == 1, "who joins knows no number to count from"


def test_while_somebody_is_waited_for_nobody_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each accusation made the check of the clock as slow as choosing who stays, because it asked
    how many these are."""
    monkeypatch.setattr(Attempt, "judged", property(lambda _: pytest.fail("judges")))
    attempt = Attempt(A, 3, False, GENESIS, WORKLOAD.layer_count)
    part = contribution(3, PresentView(ViewId(2, "f" * 64), (A, Member("b", 1)), None), A)
    attempt.add(part, open_contribution(part, lambda *_: True))
    attempt.next_round()
    assert attempt.is_waiting
    assert (
        patience_ns(attempt, AgreementTiming(), True, Lateness(), 2) == AgreementTiming().gather_ns
    )


def test_what_a_step_takes_is_measured_from_commit_to_commit() -> None:
    present = Present(Active(A, GENESIS, 0), taken_over_ns=5 * SECOND_NS)
    assert present.under_way_ns(7 * SECOND_NS) == 2 * SECOND_NS
    present.commits(9 * SECOND_NS)
    present.commits(12 * SECOND_NS)
    assert present.step_ns == 3 * SECOND_NS
    assert present.under_way_ns(20 * SECOND_NS) == 8 * SECOND_NS


@pytest.mark.parametrize("step_s", [1, 30])
def test_no_newcomer_is_stuck_before_states_can_be_offered(
    state: AgreementState, four: View, step_s: int
) -> None:
    """Machines may be slower than the plan says; states are offered between two of their steps."""
    assert state.plan is not None
    assert STEPS_AHEAD * state.plan.predicted_step_ns < 10 * SECOND_NS
    agreed_ns, agreed = 100 * SECOND_NS, state.agreed
    state.waits_for_takeover(four, agreed_ns)
    agreed.synced |= set(state.members)
    state.present.committed_ns, state.present.step_ns = agreed_ns, step_s * SECOND_NS
    syncing = Syncing(state, Telling(state))
    waited_ns = agreed_ns + 30 * SECOND_NS
    state.present.committed_ns = waited_ns - SECOND_NS // 2
    assert bool(syncing.give_up_unsynced(waited_ns)) == (step_s == 1)
    if step_s == 30:
        late_ns = agreed_ns + 90 * SECOND_NS
        state.present.committed_ns = late_ns - SECOND_NS // 2
        assert syncing.give_up_unsynced(late_ns), "two steps and eight seconds are over"


def test_of_many_each_may_take_longer() -> None:
    assert [of_many_ns(fellows, 16) for fellows in (1, 16, 24, 32, 900)] == [16, 16, 24, 32, 32]


def test_a_step_that_stands_still_ends_no_wait_for_states(
    state: AgreementState, four: View
) -> None:
    agreed_ns = 100 * SECOND_NS
    state.waits_for_takeover(four, agreed_ns)
    state.agreed.synced |= set(state.members)
    state.present.committed_ns, state.present.step_ns = agreed_ns - 3600 * SECOND_NS, SECOND_NS
    assert Syncing(state, Telling(state)).give_up_unsynced(agreed_ns + 30 * SECOND_NS)


def test_nobody_commits_in_the_future_after_a_sleep() -> None:
    present = Present(Active(A, GENESIS, 0))
    present.commits(9 * SECOND_NS)
    present.slept(lambda at_ns: min(at_ns + 3600 * SECOND_NS, 12 * SECOND_NS))
    assert present.under_way_ns(13 * SECOND_NS) == SECOND_NS
