"""Of lanes that are over, and of peers that were met once, nothing stays."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.gate.byte_budget import ByteBudget
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.net.streams import bulk
from p2p_dtfm.net.streams.bulk_settings import BulkLimits, BulkListeners
from p2p_dtfm.net.streams.byte_room import ByteRoom
from p2p_dtfm.net.streams.incoming import BULK_VERSION, IncomingLanes, LaneHello
from p2p_dtfm.net.streams.stripes import LENGTH
from tests.net.net_support import hosts, run
from tests.net.test_half_frames import RUN, _header, _Peer


class _GoneAfterHello:
    """A stream whose other end says its hello and goes before it is answered."""

    seals = True

    def __init__(self, lane: str, session: int) -> None:
        hello = encode(LaneHello(BULK_VERSION, RUN, lane, session, 0))
        self._words = [LENGTH.pack(len(hello)), hello]
        self.is_closed = False

    async def read(self, size_bytes: int) -> bytes:
        return self._words.pop(0)

    async def write(self, word: bytes) -> None:
        raise ConnectionResetError("it has gone")

    async def rest(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def _lanes() -> IncomingLanes:
    told = BulkListeners(lambda *frame: None, lambda sender, fault: None)
    room = ByteRoom(ByteBudget(1 << 20, 1 << 20))
    return IncomingLanes(SimpleNamespace(), RUN, told, BulkLimits(), room)  # type: ignore[arg-type]


def test_who_goes_right_after_its_hello_leaves_no_lane_behind() -> None:
    """Of so many in a long life there would be no room for anybody's lane any more."""

    async def scenario() -> None:
        lanes = _lanes()
        for number in range(3):
            wire: Any = _GoneAfterHello("forward", number)
            await lanes._accept(f"peer {number}", wire, None)
            assert wire.is_closed
        assert not lanes.lanes

    asyncio.run(scenario())


def test_of_peers_met_once_little_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PEERS_REMEMBERED", 3)

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = _Peer(one), _Peer(two)
            for peer in (a, b):
                await peer.plane.ready()
            sends = [
                a.plane.send(two.peer_id, "forward", _header(4, number), bytes(4))
                for number in range(8)
            ]
            await asyncio.gather(*sends)
            await a.plane.flush(two.peer_id, "forward")
            assert sorted(b.frames) == list(range(8)) and len(a.plane._outgoing) == 1
            assert not a.plane._opening
            for number in range(9):
                a.plane._measured(f"peer {number}", 1e6)
            assert list(a.plane._estimates) == [f"peer {number}" for number in (6, 7, 8)]
            for peer in (a, b):
                await peer.plane.close()

    run(scenario())
