"""Many peers ask at once. Who must answer follows from what was known, and many may wait."""

from dataclasses import replace

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.agreement_state import AgreementState
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.attempts.attempt_parts import PARKED_LIMIT
from p2p_dtfm.core.consensus.attempts.promises import SaidReady
from p2p_dtfm.core.consensus.attempts.wide import Wide
from p2p_dtfm.core.consensus.parts import requests
from p2p_dtfm.core.membership.accusers import UNANSWERED_LIMIT, Accusers
from p2p_dtfm.core.membership.eligibility import universe
from p2p_dtfm.core.membership.newcomers import WAITING_LIMIT, WAITING_WIDE_LIMIT
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    JoinRequest,
    PresentView,
    Ready,
    open_contribution,
)
from p2p_dtfm.core.messages.message_bounds import ITEMS_LIMIT, require_bounded
from p2p_dtfm.core.protocol.records import sign_record
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.invariants import Violation
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import sign_for, verify
from tests.core.builders import record
from tests.core.liars import are_together, contribution, say, swarm, view_of

VIEW = ViewId(2, "e" * 64)
MEMBERS = tuple(Member(name, 1) for name in "abcd")
SAID = [
    ("b", (Member("n1", 1),)),
    ("c", (Member("n1", 1), Member("n2", 3))),
    ("d", (Member("n2", 4),)),  # a later life of a peer that is named already
    ("n1", ()),
]


@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 1, 0, 3), (3, 0, 2, 1), (1, 3, 2, 0)])
def test_who_must_answer_is_the_same_one_by_one_and_all_at_once(
    planned: bool, order: tuple[int, ...]
) -> None:
    number, base = (4, VIEW) if planned else (3, GENESIS)
    attempt = Attempt(MEMBERS[0], number, planned, base, 4)
    present = PresentView(VIEW, MEMBERS, None)
    for name, joiners in [("a", ()), *(SAID[at] for at in order)]:
        here = present if Member(name, 1) in MEMBERS else None
        signed = contribution(number, here, Member(name, 1), joiners=joiners)
        part = open_contribution(signed, verify)
        if here is not None:  # a part that is filled from one view has one
            part = msgspec.structs.replace(part, present=present)
        attempt.add(signed, part)
        assert attempt.universe == universe(attempt.opened, planned)
        assert attempt.awaited_ids == {member.peer_id for member in attempt.universe}
        assert attempt.members == set(MEMBERS)
        assert not attempt.only_newcomers


@pytest.mark.parametrize(
    ("many_above", "waiting"), [(64, WAITING_LIMIT), (1, WAITING_WIDE_LIMIT)], ids=["few", "many"]
)
def test_at_the_door_of_one_member_more_wait_where_it_is_one_of_many(
    many_above: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "WAITING_WIDE_ABOVE", many_above)
    world = swarm(["a", "b"])
    agreement = world.peers["a"].agreement
    settings = agreement._state.settings
    settings.timing = replace(settings.timing, join_window_ns=1 << 60)
    for number in range(waiting + 20):
        name = f"n{number:03}"
        mine = msgspec.structs.replace(record(name), run_digest=settings.run_digest)
        request = JoinRequest(sign_record(mine, sign_for(name)), None, 0)
        _, fault = say(world, name, "a", request)
        assert fault is None
    assert len(agreement.joiners) == waiting


@pytest.mark.parametrize(
    ("wide", "kept"), [(None, PARKED_LIMIT), (Wide(), WAITING_WIDE_LIMIT)], ids=["few", "many"]
)
def test_in_a_swarm_of_many_a_storm_may_come_before_the_word_of_those_that_name_it(
    wide: Wide | None, kept: int
) -> None:
    """A contribution that is not kept is asked for a second later, and everybody waits for it."""
    attempt = Attempt(MEMBERS[0], 4, True, VIEW, 4)
    attempt.passed_on.wide = wide
    for number in range(WAITING_WIDE_LIMIT + 20):
        signed = contribution(4, None, Member(f"n{number:03}", 1))
        attempt.park(signed, open_contribution(signed, verify))
    assert len(attempt.set_aside.parked) == kept


def test_what_is_kept_of_those_that_nobody_has_named_is_counted_in_bytes() -> None:
    """One member could send contributions of keys that it makes, each as large as may be."""
    attempt = Attempt(MEMBERS[0], 3, False, GENESIS, 4)
    for number in range(20):
        part = open_contribution(contribution(3, None, Member(f"n{number:03}", 1)), verify)
        attempt.park(Signed(part.member.peer_id, "contribution", bytes(500_000), b""), part)
    kept = attempt.set_aside.parked
    assert sum(len(signed.payload) for signed, _ in kept.values()) <= 4 << 20
    small = contribution(3, None, Member("small", 1))
    attempt.park(small, open_contribution(small, verify))
    assert len(kept) == 9, "and there is room for a small one"


def test_of_attempts_in_which_ready_was_said_nothing_is_kept_that_is_of_no_use() -> None:
    attempt, said = Attempt(MEMBERS[0], 3, False, GENESIS, 4), SaidReady()
    signed = contribution(3, None, Member("n", 1))
    attempt.park(signed, open_contribution(signed, verify))
    said.add(attempt, Ready(MEMBERS[0], VIEW, "", ""))
    assert said.find(VIEW) is attempt and not attempt.set_aside.parked


def test_a_strangers_life_keeps_nobody_from_joining() -> None:
    """A record might state a higher life than any message. A member that let such a stranger wait
    named it, and all others refused that member for it. With one such request to a member nobody
    joined any more."""
    world = swarm(["a", "b", "c"])
    settings = world.peers["a"].agreement._state.settings
    for life in (1 << 53, 1 << 59):
        mine = msgspec.structs.replace(record("evil", life=life), run_digest=settings.run_digest)
        request = JoinRequest(sign_record(mine, sign_for("evil")), None, 0)
        _, fault = say(world, "evil", "a", request)
        assert fault is not None
    assert not world.peers["a"].agreement.joiners
    world.add_peer("honest")
    world.send("honest", "a", world.peers["honest"].agreement.wants_view())
    names = ["a", "b", "c", "honest"]
    end_ns = world.now_ns + 60 * SECOND_NS
    world.run_until(lambda: are_together(world, names) or world.now_ns > end_ns)
    assert are_together(world, names)


class TakesOneForFaulty(SimulatedPeer):
    """A peer that takes one other peer for faulty: what that peer says counts for nothing."""

    def _receive_said(self, sender: str, message: AgreementMessage) -> None:
        try:
            super()._receive_said(sender, message)
        except Violation as violation:
            if "takes evil for faulty" not in str(violation):
                raise


def test_a_member_that_names_a_thousand_that_there_are_not_keeps_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member that waits for invented names in vain says so. Others hear no word that names more
    than a thousand, and take its sender for faulty."""
    world = swarm(["a", "b", "c", "evil"], peer_type=TakesOneForFaulty)
    invented = tuple(Member(f"x{number:04}", 1) for number in range(1024))
    liar = world.peers["evil"].agreement._state
    honest = AgreementState.named_newcomers
    monkeypatch.setattr(
        AgreementState,
        "named_newcomers",
        lambda state, planned: invented if state is liar else honest(state, planned),
    )
    world.add_peer("n1")
    names = ["a", "b", "c", "n1"]
    end_ns = world.now_ns + 90 * SECOND_NS
    while world.now_ns < end_ns and not are_together(world, names):
        world.send("n1", "b", world.peers["n1"].agreement.wants_view())
        again_ns = world.now_ns + 5 * SECOND_NS
        world.run_until(lambda at=again_ns: world.now_ns > at, limit_s=10)  # type: ignore[misc]
    assert are_together(world, names)
    assert "evil" not in view_of(world, "a").member_ids, "it would have kept them out for good"


def test_each_member_names_as_many_as_may_wait_at_it() -> None:
    world = swarm(["a", "b"])
    state = world.peers["a"].agreement._state
    for number in range(WAITING_LIMIT + 8):  # more than may, as when members were many
        name = f"n{number:03}"
        mine = msgspec.structs.replace(record(name), run_digest=state.settings.run_digest)
        signed = sign_record(mine, sign_for(name))
        state.others.newcomers.ask(mine, signed, world.now_ns, WAITING_WIDE_LIMIT)
    assert len(state.others.newcomers.members) == WAITING_LIMIT + 8
    assert len(state.named_newcomers(planned=True)) == WAITING_LIMIT


def test_of_more_that_are_silent_than_others_hear_members_are_told_first() -> None:
    """Thirty-three members each name thirty-two newcomers that do not exist. Whoever told of all of
    them was taken for faulty by everybody."""
    attempt = Attempt(MEMBERS[0], 4, True, VIEW, 4)
    present = PresentView(VIEW, (*MEMBERS, Member("z", 1)), None)
    invented = tuple(Member(f"x{number:04}", 1) for number in range(1100))
    signed = contribution(4, present, MEMBERS[0], joiners=invented)
    attempt.add(signed, open_contribution(signed, verify))
    attempt.evidence.absent |= {*invented, Member("z", 1)}
    attempt.next_round()
    told = attempt.gather()
    require_bounded(told, "a")
    assert told.absent == (*invented[: ITEMS_LIMIT - 1], Member("z", 1))


def test_a_view_left_unanswered_counts_once_between_two_steps() -> None:
    """A member that has promised to wait for another view must not answer before its step commits,
    however many views are given up meanwhile."""
    seen, slow = Accusers(), MEMBERS[1]
    for _ in range(10):
        assert not seen.says_nothing([slow])
    for _ in range(UNANSWERED_LIMIT - 2):
        seen.commits()
        assert not seen.says_nothing([slow])
    seen.commits()
    assert seen.says_nothing([slow]) == {slow}


def test_only_views_in_a_row_count() -> None:
    seen, slow = Accusers(), MEMBERS[1]
    for _ in range(UNANSWERED_LIMIT):
        for _ in range(UNANSWERED_LIMIT - 1):
            assert not seen.says_nothing([slow])
            seen.commits()
        seen.answers([slow])
