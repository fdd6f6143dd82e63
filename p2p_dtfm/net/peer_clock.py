"""Another peer's clock, read through its directory node, which refuses records of wrong clocks."""

import time
from dataclasses import dataclass

from p2p_dtfm.net.errors import Unreachable, one_line
from p2p_dtfm.net.host import CONNECTION_ERRORS, Host
from p2p_dtfm.net.libp2p import DHTProtocol, PeerID, dht_pb2, get_dht_time

READINGS = 5
TOLERANCE_S = 3.0
"""The directory refuses what comes from a clock that is further off."""


@dataclass(frozen=True)
class ClockReading:
    """How far the peer's clock is ahead of ours, at best known to half a round trip."""

    offset_ns: int
    round_trip_ns: int


async def read_clock(host: Host, peer_id: str, deadline_s: float) -> ClockReading:
    """The reading with the shortest round trip of five (as in NTP). Raises `Unreachable`."""
    stub = DHTProtocol.get_stub(host.p2p, PeerID.from_base58(peer_id))
    readings = []
    for _ in range(READINGS):
        asked_s, asked_ns = get_dht_time(), time.perf_counter_ns()
        try:
            # without a node id of ours the peer does not take us for a node of the directory
            request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(), validate=False)
            answer = await stub.rpc_ping(request, timeout=deadline_s)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            raise Unreachable(peer_id, one_line(str(error) or "no answer")) from error
        round_trip_ns = time.perf_counter_ns() - asked_ns
        between_s = asked_s + round_trip_ns / 2e9
        readings.append(ClockReading(int((answer.dht_time - between_s) * 1e9), round_trip_ns))
    return min(readings, key=lambda reading: reading.round_trip_ns)
