"""What is kept for each peer is bounded: over months, most of them never come back."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.daemon.peers.self_record import LINKS_KEPT, SelfRecord
from p2p_dtfm.daemon.peers.wire import TraceReply, TraceRequest
from p2p_dtfm.daemon.telemetry import trace_collector
from p2p_dtfm.daemon.telemetry.step_recorder import StepRecorder
from p2p_dtfm.daemon.telemetry.trace_collector import CLOCKS_KEPT, TraceCollector
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.peer_clock import ClockReading
from tests.core.builders import device


async def _nothing(*_: Any, **__: Any) -> None:
    return None


class _Probes:
    """Those of a network in which some peers answer no probe."""

    def __init__(self) -> None:
        self.is_busy = False
        self.said = self.hear = None

    async def probe_round_trip(self, peer_id: str) -> int:
        return 1_000_000

    async def probe_bandwidth(self, peer_id: str) -> int:
        if self.is_busy:
            raise Unreachable(peer_id, "it is busy")
        return 1_000_000


def test_of_links_that_are_forgotten_nothing_is_kept() -> None:
    probes: Any = _Probes()
    record = SelfRecord(Member("me", 1), "00" * 32, device(), (), probes)
    is_direct = True

    async def direct(peer_id: str) -> bool:
        return is_direct

    messenger: Any = SimpleNamespace(connect=_nothing, knock=_nothing, is_direct=direct)

    async def scenario() -> None:
        nonlocal is_direct
        for number in range(LINKS_KEPT + 20):
            await record._probe(f"peer-{number}", messenger)
        assert len(record._straight) == len(record._links) == LINKS_KEPT
        is_direct, probes.is_busy, last = False, True, f"peer-{LINKS_KEPT}"
        assert not await record._probe(last, messenger)
        assert record.link_to(last) == Link(1_000_000, 1_000_000)
        assert record.forget_where_changed({last: False}), "the link that is told led another way"
        assert len(record._straight) == len(record._links) == LINKS_KEPT - 1

    asyncio.run(scenario())


def test_clocks_of_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_clock(host: object, peer_id: str, deadline_s: float) -> ClockReading:
        return ClockReading(0, 10)

    async def ask(peer_id: str, request: TraceRequest, deadline_s: float) -> bytes:
        return encode(TraceReply(()))

    monkeypatch.setattr(trace_collector, "read_clock", read_clock)
    messenger: Any = SimpleNamespace(me="me", ask=ask)
    collector = TraceCollector(StepRecorder(), messenger, None)  # type: ignore[arg-type]
    peers = [f"peer-{number}" for number in range(CLOCKS_KEPT + 20)]
    traces, _ = asyncio.run(collector.collect(peers, 0, 1))
    assert len(traces) == len(peers)
    assert len(collector._clocks) == CLOCKS_KEPT
