"""The agreement's decisions come back with their reason, and change nothing."""

import copy

import msgspec
import pytest

from p2p_dtfm.core.audit.roles import NEW
from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.attempt_parts import AttemptClock
from p2p_dtfm.core.consensus.attempts.freezing import freeze
from p2p_dtfm.core.consensus.attempts.ready_verdict import Answers, ready_verdict
from p2p_dtfm.core.consensus.attempts.stall_verdict import Remedy, stall_verdict
from p2p_dtfm.core.consensus.parts.gather.entry_verdict import EntryVerdict, entry_verdict
from p2p_dtfm.core.consensus.parts.opening import due_verdict
from p2p_dtfm.core.consensus.present import LostLayers
from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    PresentView,
    Ready,
    open_contribution,
)
from p2p_dtfm.core.messages.statements import members_digest, stated
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Member, ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.builders import WORKLOAD, record
from tests.core.liars import EVIL, contribution, evil_record, gather, one_pipeline, swarm

A, B, C = (Member(name, 1) for name in "abc")


@pytest.fixture(scope="module")
def swarm_state() -> AgreementState:
    return swarm(["a", "b", "c"]).peers["a"].agreement._state


@pytest.fixture
def state(swarm_state: AgreementState) -> AgreementState:
    """The state of `a`, in a view with `b` and `c`."""
    return copy.deepcopy(swarm_state)


def opened(*parts: Signed) -> list[Contribution]:
    return [open_contribution(part, lambda *_: True) for part in parts]


def entry(
    state: AgreementState, number: int, base: ViewId, sender: Member = B, **changes: object
) -> EntryVerdict:
    """What `a` says to a Gather that holds the sender's own contribution."""
    part = contribution(number, state.present_view(), sender, **changes)
    message = gather(number, base, part, sender=sender)
    return entry_verdict(state, message, opened(part))


def test_a_member_enters_what_succeeds_its_view(state: AgreementState) -> None:
    view = state.view_id
    planned = view.number + 2 - view.number % 2
    assert entry(state, planned, view) == EntryVerdict(True, "it succeeds the present view")
    assert entry(state, planned, ViewId(1, "f")).reason == "it succeeds another view"
    assert entry(state, planned + 1, GENESIS) == EntryVerdict(True, "members deal with a failure")
    far = entry(state, planned + 1 + (1 << 18), GENESIS)
    assert far == EntryVerdict(False, "the number is far above all that are known")
    state.promises.given_up_number = planned + 1
    assert "given it up" in entry(state, planned + 1, GENESIS).reason
    assert not entry(state, planned, view).enters


def test_a_promise_and_a_failure_go_before_a_planned_view(state: AgreementState) -> None:
    number = state.view_id.number + 2 - state.view_id.number % 2
    state.agreed.vouched = ViewId(number, "f")
    assert "has said in its Prepared" in entry(state, number, state.view_id).reason
    state.attempts.frozen = True
    assert entry(state, number, state.view_id).reason == "a failure is dealt with first"


def test_a_stranger_brings_nobody_to_enter(state: AgreementState) -> None:
    number = state.view_id.number + 2 - state.view_id.number % 2
    found = entry(state, number, state.view_id, sender=EVIL)
    assert found == EntryVerdict(False, "no member of the present view has opened it")
    found = entry(state, number + 1, GENESIS, sender=EVIL)
    assert found == EntryVerdict(False, "nobody in it proves a view with this peer in it")


def test_a_newcomer_enters_where_it_is_let_in(state: AgreementState) -> None:
    present, base = state.present_view(), state.view_id
    state.begin_life(Member("a", 2))
    part = contribution(4, present, B, joiners=(Member("a", 2),))
    message = gather(4, base, part, sender=B)
    assert entry_verdict(state, message, opened(part)).reason == "has not asked for a view"
    state.joining.wants_view = True
    assert entry_verdict(state, message, opened(part)) == EntryVerdict(True, "it is let in")
    other = contribution(4, present, B)
    found = entry_verdict(state, gather(4, base, other, sender=B), opened(other))
    assert found == EntryVerdict(False, "nobody whose word counts lets it in")


def test_an_attempt_is_due_for_a_reason(state: AgreementState) -> None:
    now_ns = state.attempts.quiet_until_ns + state.timing.lost_layers_ns
    state.others.newcomers.forget("evil")
    assert due_verdict(state, now_ns).reason == "nothing calls for another view"
    assert not due_verdict(state, now_ns).opens
    state.intent = Intent.LEAVING
    found = due_verdict(state, now_ns)
    assert found.opens and found.planned and found.reason == "a leaves"
    state.attempts.replan_reason = "b is slower"
    assert due_verdict(state, now_ns).reason == "b is slower"
    state.others.newcomers.ask(record("evil"), evil_record(), 0)
    assert due_verdict(state, now_ns).reason == "1 join"
    state.attempts.quiet_until_ns = now_ns + 1
    found = due_verdict(state, now_ns)
    assert not found.opens and found.reason == "an attempt was given up just now"
    state.attempts.frozen = True
    assert due_verdict(state, now_ns).reason == "a failure is dealt with"


def test_a_better_plan_waits_for_the_step_that_a_failure_has_stopped(state: AgreementState) -> None:
    assert state.view is not None
    snapshot = msgspec.structs.replace(state.view.snapshot, planned=False)
    state.present.view = View(snapshot, state.view.plan)
    state.attempts.replan_reason, state.present.taken_over_ns = "b is slower", 10 * SECOND_NS
    state.attempts.quiet_until_ns = 0
    said = msgspec.structs.replace(state.present.said_active, step=state.step)
    state.present.said_active = said
    now_ns = 10 * SECOND_NS + state.timing.gather_ns
    waits = due_verdict(state, now_ns - 1)
    assert not waits.opens and "the step that all wait for" in waits.reason
    assert due_verdict(state, now_ns).opens, "that may be what the step needs"
    state.present.said_active = msgspec.structs.replace(said, step=state.step - 1)
    assert due_verdict(state, 10 * SECOND_NS).opens, "it has committed"


def test_a_lost_layer_is_waited_for_and_then_given_up(state: AgreementState) -> None:
    now_ns = state.attempts.quiet_until_ns + 2 * state.timing.lost_layers_ns
    lost_ns = now_ns - state.timing.lost_layers_ns + 1
    state.present.lost = LostLayers(lost_ns, frozenset())
    assert not due_verdict(state, now_ns).opens
    found = due_verdict(state, now_ns + 1)
    assert found.opens and found.accepts_loss and not found.planned
    assert not state.present.accepts_loss, "a verdict changes nothing"


def test_after_a_sleep_nothing_is_put_off_that_has_begun_since(state: AgreementState) -> None:
    """Messages are read before the first tick. An attempt that began with one of them waited for
    silent peers for as long as the whole sleep. Nobody missed a peer that had come along late."""
    state.wake_up(10 * SECOND_NS)
    before, woken_ns = attempt_of(3, False, A), 3610 * SECOND_NS
    before.clock = AttemptClock.started(9 * SECOND_NS)
    state.attempts.under_way = before
    state.wake_up(woken_ns)
    assert woken_ns - before.clock.progress_ns == SECOND_NS, "the others have as much time as ever"

    now_ns = 2 * woken_ns
    since = state.attempts.under_way = attempt_of(5, False, A)
    since.clock = AttemptClock.started(now_ns)
    state.present.taken_over_ns = state.agreed.agreed_ns = now_ns
    state.attempts.reopen_ns = now_ns + SECOND_NS
    state.wake_up(now_ns)
    assert since.clock.began_ns == since.clock.progress_ns == now_ns
    assert state.present.taken_over_ns == state.agreed.agreed_ns == now_ns
    assert state.attempts.reopen_ns <= now_ns + state.timing.backoff_limit_ns


def attempt_of(number: int, planned: bool, *heard: Member) -> Attempt:
    """An attempt of `a` to which these peers have contributed, in a view of a, b and c."""
    view = ViewId(2, "e" * 64)
    base = view if planned else GENESIS
    attempt = Attempt(A, number, planned, base, WORKLOAD.layer_count)
    for member in heard:
        part = contribution(number, PresentView(view, (A, B, C), None), member)
        attempt.add(part, *opened(part))
    attempt.next_round()
    return attempt


def test_who_stalls_an_unplanned_attempt_is_done_without(state: AgreementState) -> None:
    attempt = attempt_of(3, False, A, B)
    found = stall_verdict(attempt, state.view)
    assert found.remedy is Remedy.GO_ON_WITHOUT and found.members == (C,)
    assert found.reason == "goes on without c: silent during Gather(3)"
    planned = stall_verdict(attempt_of(4, True, A, B), state.view)
    assert planned.remedy is Remedy.HELD_UP, "steps go on: no member loses its place at once"
    assert planned.reason == "view 4 had no answer from c"


def test_who_does_not_say_that_it_knows_the_same_is_accused(state: AgreementState) -> None:
    attempt = attempt_of(3, False, A, B, C)
    attempt.digests[B] = attempt.digests[A]
    found = stall_verdict(attempt, state.view)
    assert found.remedy is Remedy.ACCUSE and found.members == (C,)
    attempt.digests[C] = attempt.digests[A]
    found = stall_verdict(attempt, state.view)
    assert found.remedy is Remedy.REOPEN and "all alike" in found.reason
    assert stall_verdict(attempt, None).remedy is Remedy.GIVE_UP, "a newcomer reopens nothing"


def test_views_say_of_who_has_no_stage_what_they_said_when_it_came() -> None:
    """Each view put off the end of the watch, so in pipelines nobody was ever watched for long
    enough."""
    alone = Plan((Pipeline((Stage("a", 0, WORKLOAD.layer_count, 1),), 0, 1),), ("b", "c"), 1)
    bars = tuple(Bar(GENESIS, 0, name, 0, 1, NEW) for name in "ab")
    view = ViewId(2, "e" * 64)
    attempt = Attempt(A, 4, True, view, WORKLOAD.layer_count)
    for member in (A, B, C):
        present = PresentView(view, (A, B, C), alone)
        part = contribution(4, present, member, step=900, bars=bars)
        attempt.add(part, *opened(part))
    attempt.next_round()
    snapshot = freeze(attempt, "f" * 64, WORKLOAD, lambda signed: record(signed.peer_id))
    until = {bar.peer_id: bar.until_step for bar in snapshot.bars}
    assert until == {"a": 1, "b": 1} and snapshot.step >= 900
    assert attempt.snapshot == snapshot


def test_ready_is_counted_with_a_reason() -> None:
    attempt = attempt_of(3, False, A, B, C)
    assert ready_verdict(attempt).answers is Answers.MISSING
    snapshot = freeze(attempt, "f" * 64, WORKLOAD, lambda signed: record(signed.peer_id))
    plan = attempt.outcome.plan = one_pipeline(snapshot)
    view, named = snapshot.view_id, members_digest(snapshot.members)
    said = {m: stated(Ready(m, view, plan.digest(), named), sign_for(m.peer_id)) for m in (A, B, C)}
    attempt.ready[A] = said[A]
    found = ready_verdict(attempt)
    assert found.answers is Answers.MISSING and found.reason == "waits for Ready from b, c"
    attempt.ready.update(said)
    assert ready_verdict(attempt).answers is Answers.ALIKE
    attempt.ready[C] = msgspec.structs.replace(said[C], plan_digest="d" * 64)
    found = ready_verdict(attempt)
    assert found.answers is Answers.OTHER_PLANS and found.members == (C,)
    attempt.ready[B] = msgspec.structs.replace(said[B], plan_digest="d" * 64)
    assert ready_verdict(attempt).answers is Answers.OUTVOTED
    attempt.ready[B] = msgspec.structs.replace(said[B], plan_digest="c" * 64)
    assert ready_verdict(attempt).answers is Answers.SPLIT
    attempt.ready[B] = msgspec.structs.replace(said[B], view=replace_view(view))
    found = ready_verdict(attempt)
    assert found.answers is Answers.OTHER_VIEWS and found.members == (B,)


def replace_view(view: ViewId) -> ViewId:
    return ViewId(view.number, "9" * 64)
