"""Control calls: answers, refusals, silence, and limits."""

import asyncio
import contextlib
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.door import BUSY
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import BODY_LIMIT_BYTES, CONCURRENT_LIMIT_PER_PEER, ControlPlane
from tests.net.net_support import hosts, run, until


def test_answers_refusals_and_bugs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            senders = []

            async def handler(sender: str, body: bytes) -> bytes:
                senders.append(sender)
                if body == b"bad":
                    raise PeerFault("this is not done\nhere")
                if body == b"bug":
                    raise ZeroDivisionError("ours")
                return body[::-1]

            await ControlPlane(one, handler).ready()
            caller = ControlPlane(two, handler)
            assert await caller.call(one.peer_id, b"abc", 5) == b"cba"
            assert senders == [two.peer_id]
            with pytest.raises(Refused) as refused:
                await caller.call(one.peer_id, b"bad", 5)
            assert refused.value.cause == "this is not done here"
            assert refused.value.peer_id == one.peer_id and isinstance(refused.value, PeerFault)
            with pytest.raises(Refused, match="internal error"):
                await caller.call(one.peer_id, b"bug", 5)
            assert "ZeroDivisionError" in caplog.text
            largest = bytes(BODY_LIMIT_BYTES)
            assert await caller.call(one.peer_id, largest, 5) == largest
            with pytest.raises(AssertionError):
                await caller.call(one.peer_id, largest + b"x", 5)

    run(scenario())


def test_oversize_is_refused_on_receipt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):

            async def handler(sender: str, body: bytes) -> bytes:
                raise AssertionError("must not be asked")

            plane = await ControlPlane(one, handler).ready()
            from google.protobuf.wrappers_pb2 import BytesValue

            for content in (bytes(2 * BODY_LIMIT_BYTES), b"\xff\xff\xff"):
                raw = BytesValue(value=content).SerializeToString()
                body = raw if len(content) > 3 else content
                reply = await two.call(one.peer_id, plane._name, body, 5)
                assert b"\x01" in reply[:8]

    run(scenario())


def test_silence_ends_at_the_deadline_and_later_calls_work(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            release, finished = asyncio.Event(), asyncio.Event()

            async def handler(sender: str, body: bytes) -> bytes:
                if body == b"wait":
                    await release.wait()
                    finished.set()
                return body

            await ControlPlane(one, handler).ready()
            caller = ControlPlane(two, handler)
            with pytest.raises(Unreachable, match=r"0\.2 s"):
                await caller.call(one.peer_id, b"wait", 0.2)
            assert await caller.call(one.peer_id, b"next", 5) == b"next"
            release.set()  # what the handler began, it finishes
            await asyncio.wait_for(finished.wait(), 5)
            control = two.p2p._client.control
            assert not control._pending_calls
            await until(lambda: not one.calls.count, "no call is leaked")

    run(scenario())


def test_a_call_that_is_ended_by_its_name_has_no_answer(tmp_path: Path) -> None:
    """The called peer knows that name, and may give it to a call of its own that it takes back."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            begun = asyncio.Event()

            async def handler(sender: str, body: bytes) -> bytes:
                begun.set()
                return await asyncio.get_running_loop().create_future()

            await ControlPlane(one, handler).ready()
            calling = asyncio.create_task(ControlPlane(two, handler).call(one.peer_id, b"x", 30))
            await begun.wait()
            (pending,) = two.p2p._client.control._pending_calls.values()
            pending.set_result(None)
            with pytest.raises(Unreachable, match="without content"):
                await calling

    run(scenario())


def test_of_calls_that_are_taken_back_at_once_nothing_stays(tmp_path: Path) -> None:
    """The handlers of such calls may not have begun by then."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            unheard = list[Any]()
            asyncio.get_running_loop().set_exception_handler(lambda _, what: unheard.append(what))

            async def handler(sender: str, body: bytes) -> bytes:
                return body

            await ControlPlane(one, handler).ready()
            caller = ControlPlane(two, handler)
            for deadline_s in (0.0, 0.0005, 0.001, 0.002) * 8:
                with contextlib.suppress(Unreachable):
                    await caller.call(one.peer_id, bytes(100_000), deadline_s)
            await until(lambda: not one.calls.count, "no call is leaked")
            gc.collect()
            assert not unheard and await caller.call(one.peer_id, b"next", 5) == b"next"

    run(scenario())


def test_reply_in_the_turn_of_the_deadline_does_not_end_later_calls(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):

            async def handler(sender: str, body: bytes) -> bytes:
                return body

            await ControlPlane(one, handler).ready()
            caller = ControlPlane(two, handler)
            outcomes, times_s = set(), []
            for _ in range(20):
                began_s = time.perf_counter()
                await caller.call(one.peer_id, b"x", 5)
                times_s.append(time.perf_counter() - began_s)
            usual_s = statistics.median(times_s)
            # deadlines around the time that an answer takes, and far from it on a busy machine
            around = [0.02 + number / 100 for number in range(250)]
            for share in (*around, *(0.02 * 1.2**number for number in range(50))):
                try:
                    await caller.call(one.peer_id, b"x", usual_s * share)
                    outcomes.add("answered")
                except Unreachable:
                    outcomes.add("late")
            assert outcomes == {"answered", "late"}
            assert await caller.call(one.peer_id, b"still here", 5) == b"still here"
            assert not two.lost.is_set()

    run(scenario())


def test_who_is_being_answered_as_a_peer_ends_is_told_to_ask_again(tmp_path: Path) -> None:
    """The stream of that call ended cancelled, and the event loop told of it as of a bug."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            begun = asyncio.Event()

            async def handler(sender: str, body: bytes) -> bytes:
                begun.set()
                await asyncio.sleep(60)
                return body

            plane = await ControlPlane(one, handler).ready()
            caller = ControlPlane(two, handler)
            call = asyncio.create_task(caller.call(one.peer_id, b"x", 10))
            await begun.wait()
            await plane.close()
            with pytest.raises(Refused, match=BUSY):
                await call

    run(scenario())


def test_too_many_calls_at_once_are_busy(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            release = asyncio.Event()

            async def handler(sender: str, body: bytes) -> bytes:
                await release.wait()
                return body

            await ControlPlane(one, handler).ready()
            caller = ControlPlane(two, handler)
            extra = 5
            calls = [
                asyncio.create_task(caller.call(one.peer_id, b"x", 20))
                for _ in range(CONCURRENT_LIMIT_PER_PEER + extra)
            ]
            await until(lambda: sum(call.done() for call in calls) >= extra, "busy answers")
            release.set()
            results = await asyncio.gather(*calls, return_exceptions=True)
            refused = [result for result in results if isinstance(result, Refused)]
            assert len(refused) == extra and all(r.cause == "busy" for r in refused)
            assert results.count(b"x") == CONCURRENT_LIMIT_PER_PEER

    run(scenario())
