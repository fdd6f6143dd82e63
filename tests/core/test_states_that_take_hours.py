"""Models of a real size: steps of half an hour, and states of gigabytes over home connections. An
agreed view was given up after half an hour, whatever was under way, so none was ever taken over."""

import copy
from dataclasses import replace

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.parts.syncing import STEPS_AHEAD, Syncing
from p2p_dtfm.core.consensus.parts.wide.telling import Telling
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.recovery.view import View

AGREED_NS = 100 * SECOND_NS
NEW = Member("d", 1)


@pytest.fixture
def state(three: AgreementState) -> AgreementState:
    """The state of `a`, in a view with `b` and `c`."""
    return copy.deepcopy(three)


def waits(state: AgreementState, view: View) -> Syncing:
    """A view that waits for the states of `d` alone."""
    state.waits_for_takeover(view, AGREED_NS)
    state.agreed.synced |= set(state.members)
    state.present.committed_ns = AGREED_NS
    return Syncing(state, Telling(state))


def gives_up(syncing: Syncing, state: AgreementState, after_s: float) -> bool:
    """Whether the view is given up by then; what `d` has grows until then."""
    now_ns = AGREED_NS + round(after_s * SECOND_NS)
    for before in range(20, 0, -1):
        size = 10**12 * (21 - before)
        state.agreed.given.note(state.me, {NEW.peer_id: size}, now_ns - before * SECOND_NS)
    state.present.committed_ns = max(state.present.committed_ns, now_ns - SECOND_NS)
    return bool(syncing.give_up_unsynced(now_ns))


def test_steps_of_half_an_hour_leave_time_to_offer_states(
    state: AgreementState, four: View
) -> None:
    step_s = 1800
    syncing = waits(state, four)
    state.present.step_ns = step_s * SECOND_NS
    assert not gives_up(syncing, state, STEPS_AHEAD * step_s - 60)
    assert gives_up(syncing, state, STEPS_AHEAD * step_s + 60)


def with_large_states(view: View, gigabytes: int, bytes_per_s: int) -> View:
    """The view in which `d` has large states to fetch, over a link that `a` has measured."""
    snapshot, workload = view.snapshot, view.snapshot.workload
    block = msgspec.structs.replace(workload.block, state_bytes=gigabytes << 30)
    link = Link(10_000_000, bytes_per_s)
    records = tuple(
        msgspec.structs.replace(it, links={NEW.peer_id: link}) if it.peer_id == "a" else it
        for it in snapshot.records
    )
    large = msgspec.structs.replace(workload, block=block)
    return replace(
        view, snapshot=msgspec.structs.replace(snapshot, workload=large, records=records)
    )


@pytest.mark.parametrize("bytes_per_s", [1_000_000, 1_000])
def test_a_newcomer_has_the_time_that_its_line_takes(
    state: AgreementState, four: View, bytes_per_s: int
) -> None:
    view = with_large_states(four, 4, bytes_per_s)
    takes_s = view.state_bytes_of(NEW.peer_id) / max(bytes_per_s, 250_000)
    sync_s = state.timing.sync_ns // SECOND_NS
    assert takes_s > sync_s
    syncing = waits(state, view)
    assert not gives_up(syncing, state, sync_s + takes_s - 60)
    assert gives_up(syncing, state, sync_s + takes_s + 60), "and no longer, be it ever so thin"


def test_who_waits_to_be_in_it_has_twice_the_time_of_the_members(
    state: AgreementState, four: View
) -> None:
    """The newcomer knows the plan that is to come, and none in force."""
    step_s, sync_s = 1800, state.timing.sync_ns // SECOND_NS
    view = replace(
        four, plan=msgspec.structs.replace(four.plan, predicted_step_ns=step_s * SECOND_NS)
    )
    state.waits_for_takeover(view, AGREED_NS)
    state.present.view = state.present.ledger = None
    assert state.is_newcomer
    limit_ns = AGREED_NS + 2 * (sync_s + STEPS_AHEAD * step_s) * SECOND_NS
    syncing = Syncing(state, Telling(state))
    assert not syncing.give_up_unsynced(limit_ns - 60 * SECOND_NS)
    assert syncing.give_up_unsynced(limit_ns + 60 * SECOND_NS)
