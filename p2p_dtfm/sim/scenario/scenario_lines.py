"""A scenario's links as a virtual network has them; peers are numbers in the file's order."""

from p2p_dtfm.core.virtual.virtual_network import Lines
from p2p_dtfm.sim.scenario.scenario import Scenario


def lines_of(scenario: Scenario) -> Lines:
    """The link of a pair that the scenario does not state raises `UserError` when it is used."""
    peers = scenario.peers

    def link(origin: int, to: int) -> tuple[int, int]:
        stated = scenario.link(peers[origin].name, peers[to].name)
        return stated.latency_ns, stated.bytes_per_s

    return Lines(
        link,
        [peer.uplink_bytes_per_s for peer in peers],
        [peer.downlink_bytes_per_s for peer in peers],
    )
