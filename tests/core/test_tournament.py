"""Measuring in rounds: nobody is in two measurements at once, and every pair meets."""

from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.schedule.tournament import partner_order


@given(st.lists(st.text(max_size=4), min_size=1, max_size=24, unique=True))
def test_rounds_do_not_collide_and_all_pairs_meet_once(names: list[str]) -> None:
    peers = sorted(names)
    orders = {peer: partner_order(peer, peers) for peer in peers}
    assert len({len(order) for order in orders.values()}) == 1, "all count the same rounds"
    for peer, order in orders.items():
        assert sorted(other for other in order if other is not None) == [
            other for other in peers if other != peer
        ]
        for number, partner in enumerate(order):
            if partner is not None:
                assert orders[partner][number] == peer, "partners are mutual"
        assert sum(partner is None for partner in order) <= 1
