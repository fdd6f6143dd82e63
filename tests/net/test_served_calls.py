"""What strangers may have a peer and its p2pd keep by calls that they begin, or do not take."""

import asyncio
import time
import uuid
from pathlib import Path

import psutil
import pytest

from p2p_dtfm.net.door import OpenDoor
from p2p_dtfm.net.hivemind_parts import PeerID, p2pd_pb2
from p2p_dtfm.net.libp2p import served_calls
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.libp2p.served_calls import FAR_LIMIT_PER_PEER, varint
from tests.net.net_support import hosts, run, until

MIB = 1 << 20
NAME = "/p2p-dtfm/1/control"


class OfStrangers(OpenDoor):
    def is_near(self, sender: str) -> bool:
        return False


async def _echo(sender: str, body: bytes) -> bytes:
    return body


def _request(called: Host, call_id: bytes, body: bytes = b"") -> bytes:
    """A call as p2pd writes it, from its length on."""
    call = p2pd_pb2.CallUnaryRequest(
        peer=PeerID.from_base58(called.peer_id).to_bytes(), proto=NAME, data=body
    )
    request = p2pd_pb2.PersistentConnectionRequest(callId=call_id, callUnary=call)
    data = bytes(request.SerializeToString())
    return varint(len(data)) + data


async def _begun(caller: Host, called: Host, begun: bytes) -> asyncio.StreamReader:
    reader, writer = await caller.open_stream(called.peer_id, NAME, 5)
    try:
        writer.write(begun)
        await writer.drain()
    except (OSError, RuntimeError):
        writer.close()  # the stream was turned away
    return reader


@pytest.mark.parametrize(("announced", "count"), [(4 * MIB, 64), (MIB, 100)])
def test_calls_that_are_never_whole_fill_no_memory(
    tmp_path: Path, announced: int, count: int
) -> None:
    """p2pd kept any number of such calls in memory, until it was ended for that."""

    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (one, two, three):
            one.door = OfStrangers()
            await ControlPlane(one, _echo).ready()
            p2pd = psutil.Process(one.p2pd_pid)
            before, own = p2pd.memory_info().rss, psutil.Process().memory_info().rss
            half = varint(announced) + bytes(announced - 1)
            kept = [await _begun(two, one, half) for _ in range(count)]
            await asyncio.sleep(0.5)
            assert one.calls.count <= FAR_LIMIT_PER_PEER
            assert p2pd.memory_info().rss - before < 48 * MIB
            assert psutil.Process().memory_info().rss - own < 128 * MIB
            caller = ControlPlane(three, _echo)
            assert await caller.call(one.peer_id, b"honest", 5.0) == b"honest"
            assert len(kept) == count

    run(scenario())


def test_calls_of_one_name_are_all_answered(tmp_path: Path) -> None:
    """The caller chooses the name. p2pd waited for ever to say all answers but one."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            answers = asyncio.Event()

            async def slowly(sender: str, body: bytes) -> bytes:
                await answers.wait()
                return body

            await ControlPlane(one, slowly).ready()
            asked = _request(one, uuid.uuid4().bytes)
            readers = [await _begun(two, one, asked) for _ in range(20)]
            await until(lambda: one.calls.count == 20, "all have come")
            answers.set()
            said = await asyncio.gather(*(asyncio.wait_for(it.read(1), 5) for it in readers))
            assert all(said)

    run(scenario())


def test_what_is_half_sent_has_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(served_calls, "PATIENCE_S", 0.3)
        async with hosts(tmp_path, 2) as (one, two):
            await ControlPlane(one, _echo).ready()
            for begun in (b"", _request(one, uuid.uuid4().bytes)[:-1]):
                reader = await _begun(two, one, begun)
                assert await asyncio.wait_for(reader.read(), 5) == b""
            await until(lambda: not one.calls.count, "nothing stays")

    run(scenario())


def test_an_answer_that_is_not_taken_has_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(served_calls, "PATIENCE_S", 0.3)
        async with hosts(tmp_path, 2) as (one, two):

            async def much(sender: str, body: bytes) -> bytes:
                return bytes(MIB // 2)

            monkeypatch.setattr(served_calls, "LEAST_BYTES_PER_S", MIB)
            await ControlPlane(one, much).ready()
            await _begun(two, one, _request(one, uuid.uuid4().bytes))
            await until(lambda: one.calls.count == 1, "it has come")
            await until(lambda: not one.calls.count, "nothing stays")

    run(scenario())


def test_many_calls_wait_while_an_event_loop_has_no_time(tmp_path: Path) -> None:
    """This happens where a peer starts with others at once. hivemind lets a hundred calls wait, and
    p2pd ends the rest, so the caller takes this peer for gone."""

    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (one, *callers):
            await one.serve_calls("/echo", _echo)
            for caller in callers:
                assert await caller.call(one.peer_id, "/echo", b"x", 5.0) == b"x"
            calls = [
                asyncio.create_task(caller.call(one.peer_id, "/echo", b"x", 30.0))
                for caller in callers
                for _ in range(100)
            ]
            await asyncio.sleep(0)
            while any(it.p2p._client.control._pending_messages.qsize() for it in callers):
                await asyncio.sleep(0)
            time.sleep(1.0)
            assert await asyncio.gather(*calls) == 200 * [b"x"]

    run(scenario())
