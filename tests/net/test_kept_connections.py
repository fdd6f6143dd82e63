"""A p2pd with too many connections drops those of strangers; a p2pd that hangs goes itself."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.net.hivemind_parts import p2pd_pb2, p2pd_wire
from p2p_dtfm.net.libp2p import host as host_module
from p2p_dtfm.net.libp2p import kept_connections
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.libp2p.kept_connections import (
    ANSWERS_WITHIN_S,
    LATE_S,
    LOOK_EVERY_S,
    SILENT_LIMIT_S,
    Silence,
)
from p2p_dtfm.ports import now
from tests.net.net_support import LOOPBACK, run

STRANGERS = 6


async def _trim(host: Host) -> None:
    """Trim connections as p2pd does by itself, every ten seconds where it has too many."""
    reader, writer = await host.p2p._client.control.daemon_connector.open_connection()
    trim = p2pd_pb2.ConnManagerRequest(type=p2pd_pb2.ConnManagerRequest.TRIM)
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNMANAGER, connManager=trim)
    await p2pd_wire.write_pbmsg(writer, request)
    await p2pd_wire.read_pbmsg_safe(reader, p2pd_pb2.Response())
    writer.close()


def test_strangers_that_hold_streams_push_no_idle_member_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags_of = host_module.flags_of

    def with_low_marks(*arguments: Any) -> list[str]:
        return [*flags_of(*arguments), "-connLo=2", "-connHi=4", "-connGrace=1s"]

    async def scenario() -> None:
        monkeypatch.setattr(kept_connections, "FEW", 2)
        monkeypatch.setattr(kept_connections, "LOOK_EVERY_S", 0.2)
        async with contextlib.AsyncExitStack() as stack:

            async def started(name: str) -> Host:
                host = await Host.start(tmp_path / name, LOOPBACK)
                stack.push_async_callback(host.close)
                return host

            monkeypatch.setattr(host_module, "flags_of", with_low_marks)
            one = await started("one")
            monkeypatch.setattr(host_module, "flags_of", flags_of)
            member = await started("member")
            one.calling.trusts = lambda peer_id: peer_id == member.peer_id

            async def hold(sender: str, reader: asyncio.StreamReader, writer: Any) -> None:
                await reader.read()

            await one.serve_streams("held", hold)
            where = await one.addresses()
            await member.connect(one.peer_id, where, 5, is_chosen=True)
            for number in range(STRANGERS):
                stranger = await started(f"stranger-{number}")
                await stranger.connect(one.peer_id, where, 5, is_chosen=True)
                await stranger.open_stream(one.peer_id, "held", 5)
            await asyncio.sleep(1.5)
            await _trim(one)
            await asyncio.sleep(0.5)
            left = await one.connected_peers()
            assert member.peer_id in left and len(left) < STRANGERS

    run(scenario())


def test_a_p2pd_that_hangs_is_lost_as_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the daemon nor a bootstrap node noticed; each was alone from then on."""
    monkeypatch.setattr(kept_connections, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(kept_connections, "SILENT_LIMIT_S", 1.0)

    async def scenario() -> None:
        host = await Host.start(tmp_path / "one", LOOPBACK)
        try:
            await asyncio.sleep(0.5)
            assert not host.lost.is_set()
            monkeypatch.setattr(host_module, "CLOSE_DEADLINE_S", 0.3)
            os.kill(host.p2pd_pid, signal.SIGSTOP)
            await asyncio.wait_for(host.lost.wait(), 10)
        finally:
            await host.close()

    run(scenario())


def test_a_silence_counts_while_this_process_has_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stands still, or swaps, nobody speaks."""
    seconds, ended = [1000.0], []
    monkeypatch.setattr(now, "monotonic_s", lambda: seconds[0])
    heard: Any = SimpleNamespace(heard_s=0.0)
    silence = Silence(heard, lambda: ended.append(seconds[0]))
    each_s = LOOK_EVERY_S + ANSWERS_WITHIN_S

    def asked_in_vain(times: int, late_s: float = 0.0) -> None:
        for _ in range(times):
            seconds[0] += each_s + late_s
            silence.lasts()

    enough = round(SILENT_LIMIT_S / each_s)
    asked_in_vain(10 * enough, late_s=LATE_S + 1)
    asked_in_vain(enough - 1)
    heard.heard_s = seconds[0] + 1  # somebody is heard through p2pd
    asked_in_vain(enough)
    silence.over()
    asked_in_vain(enough - 1)
    assert not ended
    asked_in_vain(1)
    assert ended == [seconds[0]]
