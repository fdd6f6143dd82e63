"""The gate's table: who may say what, how often, and what a refusal costs; all of it bounded."""

from typing import get_args

import pytest

from p2p_dtfm.core.gate.byte_budget import ByteBudget
from p2p_dtfm.core.gate.gate import (
    MUTED_NS,
    PATIENCE,
    SECOND_NS,
    SENDERS_LIMIT,
    Admitted,
    Gate,
    GateRefusal,
    Reason,
)
from p2p_dtfm.core.gate.gate_table import EVERYBODY, FAR, FILES, MEMBERS, TABLE, Role, row_of
from p2p_dtfm.daemon.peers.wire import Message
from p2p_dtfm.net.streams.bulk import LANES


def _gate(role: Role = Role.STRANGER, outside: bool = False, is_open: bool = False) -> Gate:
    """A gate for which the role of a sender is the part of its name before a colon, or `role`."""

    def role_of(sender: str) -> Role:
        return Role(sender.split(":")[0]) if ":" in sender else role

    return Gate(role_of, lambda: outside, lambda: is_open)


def test_every_message_and_every_lane_has_a_row() -> None:
    kinds = {message.__name__ for message in get_args(Message)} | {f"lane {lane}" for lane in LANES}
    assert kinds <= TABLE.keys(), f"without a row: {kinds - TABLE.keys()}"


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_each_row_lets_in_its_roles_and_nobody_else(kind: str) -> None:
    row = TABLE[kind]
    for outside, roles in ((False, row.roles), (True, row.outside or row.roles)):
        for role in Role:
            answer = _gate(outside=outside).admit(f"{role}:a", kind, 0, 0)
            if role in roles:
                assert answer == Admitted(role)
            else:
                assert answer == GateRefusal(role, Reason.PLACE)


@pytest.mark.parametrize("kind", sorted(TABLE))
def test_each_row_bounds_size_and_rate(kind: str) -> None:
    row = TABLE[kind]
    for role in row.roles:
        gate, sender = _gate(), f"{role}:a"
        limit_bytes = row.size_bytes
        if role is Role.STRANGER and row.stranger_bytes is not None:
            limit_bytes = row.stranger_bytes
        assert gate.admit(sender, kind, limit_bytes + 1, 0) == GateRefusal(role, Reason.SIZE)
        rate = row.sender if role in FAR else row.near
        answers = [gate.admit(sender + "b", kind, limit_bytes, 0) for _ in range(rate.burst + 1)]
        assert answers[:-1] == [Admitted(role)] * rate.burst
        assert answers[-1] == GateRefusal(role, Reason.RATE)
        later = gate.admit(sender + "b", kind, limit_bytes, 2 * SECOND_NS)
        assert later == Admitted(role), "what is used up comes back"


def test_nothing_of_a_stranger_reaches_what_members_alone_may() -> None:
    for kind in ("FollowLayers", "TraceRequest", "weights", "data", "something new"):
        for role in Role:
            let_in = isinstance(_gate().admit(f"{role}:a", kind, 0, 0), Admitted)
            assert let_in == (role is Role.MEMBER), (kind, role)


def test_an_open_run_gives_its_files_to_everybody() -> None:
    for kind in FILES:
        assert row_of(kind, is_open=True).roles == EVERYBODY
        assert isinstance(_gate(is_open=True).admit("stranger:a", kind, 0, 0), Admitted)
    assert row_of("FollowLayers", is_open=True).roles == MEMBERS


def test_a_thousand_keys_gain_nothing_and_take_nothing_from_members() -> None:
    gate = _gate()
    row = TABLE["Hello"]
    let_in = sum(
        isinstance(gate.admit(f"stranger:{number}", "Hello", 10, 0), Admitted)
        for number in range(5000)
    )
    assert let_in == row.together.burst
    assert isinstance(gate.admit("member:a", "Hello", 10, 0), Admitted)
    assert isinstance(gate.admit("newcomer:a", "Hello", 10, 0), Admitted)
    assert len(gate._senders) <= SENDERS_LIMIT


def test_a_member_is_never_slowed_by_what_a_correct_one_sends() -> None:
    gate = _gate(Role.MEMBER)
    for tick in range(10_000):  # ten seconds with a message in each millisecond
        answer = gate.admit("a", "Prepared", 2_000, tick * 1_000_000)
        assert isinstance(answer, Admitted)


def test_refusals_cost_and_mute_for_growing_times() -> None:
    gate, now_ns = _gate(), 0
    for times in (1, 2, 4):
        for _ in range(PATIENCE + 1):
            assert gate.admit("a", "FollowLayers", 0, now_ns) == GateRefusal(
                Role.STRANGER, Reason.PLACE
            )
        assert gate.admit("a", "Hello", 0, now_ns) == GateRefusal(Role.STRANGER, Reason.MUTED)
        now_ns += times * MUTED_NS - 1
        assert gate.admit("a", "Hello", 0, now_ns) == GateRefusal(Role.STRANGER, Reason.MUTED)
        now_ns += 1
    assert isinstance(gate.admit("a", "Hello", 0, now_ns), Admitted)
    assert gate.refused["stranger", "FollowLayers", "not its place to say"] == 3 * (PATIENCE + 1)
    assert gate.refused["stranger", "Hello", "muted"] == 6


def test_a_member_is_not_muted() -> None:
    gate = _gate(Role.MEMBER)
    for _ in range(10 * PATIENCE):
        gate.blame("a", "Gather", 0)
    assert isinstance(gate.admit("a", "Gather", 0, SECOND_NS), Admitted)


def test_what_is_served_at_once_is_bounded_for_one_and_for_all_strangers() -> None:
    gate, row = _gate(), TABLE["blob"]
    for _ in range(row.at_once):
        assert isinstance(gate.admit("a", "blob", 0, 0, stays=True), Admitted)
    assert gate.admit("a", "blob", 0, 0, stays=True) == GateRefusal(Role.STRANGER, Reason.AT_ONCE)
    gate.left("a", Role.STRANGER, "blob")
    assert isinstance(gate.admit("a", "blob", 0, 0, stays=True), Admitted)
    others = [gate.admit(f"b{n}", "blob", 0, 0, stays=True) for n in range(10 * row.at_once)]
    assert sum(isinstance(answer, Admitted) for answer in others) == 3 * row.at_once
    assert isinstance(gate.admit("member:a", "blob", 0, 0, stays=True), Admitted)


def test_bytes_in_flight_are_bounded_for_one_and_for_all() -> None:
    budget = ByteBudget(of_one=100, in_all=150)
    assert budget.take("a", 60) and not budget.take("a", 60) and budget.take("b", 60)
    assert not budget.take("c", 60, goes_first=False) and not budget.take("b", 40), "all together"
    assert budget.take("c", 60), "who has none in flight is let through, whoever fills the room"
    assert not budget.take("c", 1) and budget.total == 180
    for sender in "ac":
        budget.give_back(sender, 60)
    assert budget.take("c", 60, goes_first=False) and budget.total == 120
    for sender in "bc":
        budget.give_back(sender, 60)
    assert budget.take("a", 1000, goes_first=False), "one alone, or it would never come"
    assert budget.held("a") == 1000 and not budget.take("b", 1, goes_first=False)
    assert budget.take("b", 1000) and not budget.take("b", 1)
