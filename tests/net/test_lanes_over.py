"""Nothing stays of lanes that are over, and of peers that were met once."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.gate.byte_budget import ByteBudget
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.streams import bulk, incoming
from p2p_dtfm.net.streams.bulk_settings import BulkLimits, BulkListeners
from p2p_dtfm.net.streams.byte_room import ByteRoom
from p2p_dtfm.net.streams.incoming import BULK_VERSION, IncomingLanes, LaneHello
from p2p_dtfm.net.streams.wire import LENGTH
from p2p_dtfm.ports import now
from tests.net.net_support import hosts, run, until
from tests.net.test_half_frames import RUN, _Clock, _header, _Peer


class _GoneAfterHello:
    """A stream whose other end says its hello and goes before it has an answer."""

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


class _Silent(_GoneAfterHello):
    """A stream whose other end stays, and sends nothing."""

    def __init__(self, lane: str, session: int) -> None:
        super().__init__(lane, session)
        self._over = asyncio.Event()

    async def write(self, word: bytes) -> None: ...

    async def read_frame(self, *told: Any) -> None:
        await self._over.wait()

    def close(self) -> None:
        super().close()
        self._over.set()


def _lanes() -> IncomingLanes:
    told = BulkListeners(lambda *frame: None, lambda sender, fault: None)
    room = ByteRoom(ByteBudget(1 << 20, 1 << 20))
    return IncomingLanes(SimpleNamespace(), RUN, told, BulkLimits(), room)  # type: ignore[arg-type]


def test_who_goes_right_after_its_hello_leaves_no_lane_behind() -> None:
    """After many such peers in a long life there would be no room for anybody's lane any more."""

    async def scenario() -> None:
        lanes = _lanes()
        for number in range(3):
            wire: Any = _GoneAfterHello("forward", number)
            await lanes._accept(f"peer {number}", wire, None)
            assert wire.is_closed
        assert not lanes.lanes

    event_loop.run(scenario())


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


def test_lanes_to_who_has_left_take_no_place_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run of months there may be any number of neighbours that come and go."""
    monkeypatch.setattr(bulk, "STREAMS_LIMIT", 1)

    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (one, two, three):
            a, b, c = [_Peer(host) for host in (one, two, three)]
            for peer in (a, b, c):
                await peer.plane.ready()
            await a.plane.send(two.peer_id, "forward", _header(4, 1), bytes(4))
            await a.plane.flush(two.peer_id, "forward")
            with pytest.raises(Unreachable, match="already 1"):
                await a.plane.send(three.peer_id, "forward", _header(4, 2), bytes(4))
            await b.plane.close()
            await until(lambda: bool(a.lost), "its lane broke")
            await a.plane.send(three.peer_id, "forward", _header(4, 3), bytes(4))
            await a.plane.flush(three.peer_id, "forward")
            assert c.frames == [3] and list(a.plane.carriers()) == [three.peer_id]
            for peer in (a, c):
                await peer.plane.close()

    run(scenario())


@pytest.mark.parametrize("by_lines", [False, True])
def test_of_many_lanes_those_that_stand_idle_end_at_both_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_lines: bool
) -> None:
    """In a large swarm each peer is everybody's neighbour once. A line takes a thread and three
    descriptors at each end."""
    monkeypatch.setattr(bulk, "LANES_KEPT", 2)

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = [_Peer(host, by_lines=by_lines) for host in (one, two)]
            for peer in (a, b):
                await peer.plane.ready()
            to = two.peer_id

            async def say(lane: str, index: int) -> None:
                await a.plane.send(to, lane, _header(4, index), bytes(4))
                await a.plane.flush(to, lane)

            for index, lane in enumerate(("forward", "backward", "reduce")):
                await say(lane, index)
                if by_lines:
                    await until(lambda lane=lane: a.plane.is_direct(to, lane), "it moves")
            assert set(a.plane.carriers()[to]) == {"forward", "backward", "reduce"}, "none is idle"
            await say("backward", 3)
            for room in (bulk, incoming):
                monkeypatch.setattr(room, "IDLE_S", 0.0)
            await say("state", 4)
            assert set(a.plane.carriers()[to]) == {"backward", "state"}
            here = a.plane._outgoing.keys(), b.plane._incoming.lanes.keys()
            await until(lambda: len(here[0]) == len(here[1]) == 2, "so it is at the other end")
            if by_lines:
                for peer in (a, b):
                    lines: Any = peer.plane._lines
                    await until(lambda lines=lines: len(lines._lines) <= 2, "threads have ended")
            await say("forward", 5)
            assert b.frames == list(range(6)) and not (a.faults or b.faults)
            assert not (a.lost or b.lost), "nobody is the worse for it, nor suspected"
            for peer in (a, b):
                await peer.plane.close()

    run(scenario())


def test_idle_lanes_of_who_is_no_member_give_way_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be any number of former members, and each may open lanes and say nothing."""
    monkeypatch.setattr(incoming, "STREAMS_LIMIT", 2)

    async def scenario() -> None:
        clock = _Clock()
        now.live_by(clock)
        lanes = _lanes()
        members = {"member", "another"}
        lanes._host.door = SimpleNamespace(goes_first=members.__contains__)  # type: ignore
        wires = {name: _Silent("forward", 1) for name in ("member", "former", "another", "late")}
        tasks = []
        for name in ("member", "former"):
            tasks.append(asyncio.create_task(lanes._accept(name, wires[name], None)))
            await asyncio.sleep(0.05)
        clock.goes_on(incoming.IDLE_S / 2)
        with pytest.raises(PeerFault, match="already 2"):
            lanes._lane_of("late", LaneHello(BULK_VERSION, RUN, "forward", 1, 0))
        clock.goes_on(incoming.IDLE_S)
        tasks.append(asyncio.create_task(lanes._accept("another", wires["another"], None)))
        await asyncio.sleep(0.1)
        assert wires["former"].is_closed and not wires["member"].is_closed
        assert {sender for sender, _ in lanes.lanes} == {"member", "another"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    event_loop.run(scenario())


def test_a_hello_that_comes_late_ends_no_lane_that_was_opened_after_it() -> None:
    """A peer that says nothing for ten seconds, as on waking, is called again another way. It then
    reads both hellos in whichever order."""

    async def scenario() -> None:
        lanes, second_ns = _lanes(), 1_000_000_000
        opened, restarted = _Silent("forward", 9_000 * second_ns), _Silent("forward", 5)
        late: Any = _Silent("forward", 8_985 * second_ns)
        tasks = [asyncio.create_task(lanes._accept("sender", opened, None))]  # type: ignore
        await asyncio.sleep(0.05)
        await asyncio.wait_for(lanes._accept("sender", late, None), 2)
        assert late.is_closed and not opened.is_closed
        assert lanes.lanes["sender", "forward"].session == 9_000 * second_ns
        # a peer that was started again may have another clock
        tasks.append(asyncio.create_task(lanes._accept("sender", restarted, None)))  # type: ignore
        await asyncio.sleep(0.05)
        assert opened.is_closed and lanes.lanes["sender", "forward"].session == 5
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())
