"""What travels along an overlay is for swarms of many: nobody makes a small one speak so, and what
strangers name is not kept for ever."""

import msgspec
import pytest

from p2p_dtfm.core.messages.agreement_messages import Bodies, Spread
from p2p_dtfm.core.messages.outlines import RECORDS_LIMIT_BYTES, NamedBodies, record_name
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member
from tests.core.liars import EVIL, evil_record, say, swarm, trains_on, view_of

NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("sender", [EVIL, Member("other", 1)])
def test_a_stranger_makes_no_small_swarm_speak_along_an_overlay(sender: Member) -> None:
    world = swarm(NAMES)
    view, evil = view_of(world, "a"), evil_record()
    for number in (view.id.number // 2 * 2 + 2, view.id.number // 2 * 2 + 3):
        planned = number % 2 == 0
        bodies = Bodies(records=(evil,))
        spread = Spread(sender, number, planned, view.id, 1, "", bodies=bodies, wants=("a",))
        actions, fault = say(world, sender.peer_id, "a", spread)
        assert not actions and fault is None
        attempts = world.peers["a"].agreement._state.attempts
        assert attempts.spread_number != number and not attempts.early
        assert world.peers["a"].agreement._state.others.bodies.record(record_name(evil)) is None
        heard = world.peers["a"].agreement.last_heard
        assert heard is not None and "a swarm of many" in heard.reason
    trains_on(world, NAMES)


def test_records_that_were_named_are_kept_up_to_so_many_bytes() -> None:
    bodies, first = NamedBodies(), evil_record()
    kept = bodies.keep_record(first)
    large = [_padded(first, number) for number in range(2)]
    for record in large:
        bodies.keep_record(record)
    assert bodies.record(kept) is None
    assert bodies.record(record_name(large[0])) is None
    assert bodies.record(record_name(large[1])) == large[1]


def _padded(record: Signed, number: int) -> Signed:
    size_bytes = RECORDS_LIMIT_BYTES // 2 + 1
    return msgspec.structs.replace(record, payload=bytes([number]) * size_bytes)
