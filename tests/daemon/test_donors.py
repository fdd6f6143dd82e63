"""The peer that is asked for a file first."""

from types import SimpleNamespace
from typing import cast

from p2p_dtfm.daemon.node.network import LATELY_S, Network
from p2p_dtfm.ports import now


def test_one_that_stands_still_is_asked_last() -> None:
    now_s = now.monotonic_s()
    heard_s = {"a": now_s - 2 * LATELY_S, "b": now_s, "d": now_s - 0.5 * LATELY_S}
    messenger = SimpleNamespace(known=("a", "b", "c", "d", "me"), heard_s=heard_s)
    parts = SimpleNamespace(messenger=messenger, me=SimpleNamespace(peer_id="me"))
    network = cast(Network, parts)
    parts.others = lambda: Network.others(network)
    asked = [Network.donors(network) for _ in range(40)]
    assert {frozenset(order[:2]) for order in asked} == {frozenset("bd")}
    assert all(order[2:] == ["a", "c"] for order in asked)
    assert len({order[0] for order in asked}) == 2, "not all ask the same one first"
