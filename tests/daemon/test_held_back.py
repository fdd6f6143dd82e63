"""A peer that computes alone tells the others of several steps at a time."""

from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.peers.held_back import LIMIT, TOLD_EVERY_S, HeldBack

VIEW = ViewId(4, "four")


def signed(number: int) -> Signed:
    return Signed("me", "prepared", bytes([number]), b"")


def test_nothing_is_left_out_and_nothing_waits_longer_than_it_may() -> None:
    held = HeldBack()
    held.add(VIEW, signed(0))
    assert held.is_due(100.0), "the first at once"
    assert held.take(100.0) == (signed(0),)
    for number in (1, 2):
        held.add(VIEW, signed(number))
        assert not held.is_due(100.0 + TOLD_EVERY_S / 2)
    assert held.is_due(100.0 + TOLD_EVERY_S)
    assert held.take(101.0) == (signed(1), signed(2)) and held.take(101.0) == ()


def test_a_message_is_bounded_and_another_view_has_its_own() -> None:
    held = HeldBack()
    held.take(100.0)
    for number in range(LIMIT):
        assert not held.is_due(100.0)
        held.add(VIEW, signed(number))
    assert held.is_due(100.0)
    held.add(ViewId(6, "six"), signed(99))
    assert held.take(100.0) == (signed(99),)
