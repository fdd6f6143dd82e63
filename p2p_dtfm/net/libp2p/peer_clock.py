"""Another peer's clock, read through its directory node, which refuses records of wrong clocks."""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.hivemind_parts import dht_pb2, get_dht_time
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.ports import now

READINGS = 5
_PING = "DHTProtocol.rpc_ping"
TOLERANCE_S = 3.0
"""The directory refuses records from a clock that is further off."""


@dataclass(frozen=True)
class ClockReading:
    """How far the peer's clock is ahead of ours, at best known to half a round trip."""

    offset_ns: int
    round_trip_ns: int


async def read_clock(host: HostPort, peer_id: str, deadline_s: float) -> ClockReading:
    """The reading with the shortest round trip of five (as in NTP). Raises `Unreachable`."""
    # without a node id of ours the peer does not take this one for a node of the directory
    request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(), validate=False).SerializeToString()
    readings = []
    for _ in range(READINGS):
        asked_s, asked_ns = get_dht_time(), now.monotonic_ns()
        reply = await host.call(peer_id, _PING, request, deadline_s)
        round_trip_ns = now.monotonic_ns() - asked_ns
        try:
            answer = dht_pb2.PingResponse.FromString(reply)
        except DecodeError as error:
            raise Unreachable(peer_id, "an answer that is not the directory's") from error
        if not 0 <= answer.dht_time < 1e11:  # this refuses NaN, too
            raise Unreachable(peer_id, "an answer without a time")
        between_s = asked_s + round_trip_ns / 2e9
        readings.append(ClockReading(int((answer.dht_time - between_s) * 1e9), round_trip_ns))
    return min(readings, key=lambda reading: reading.round_trip_ns)
