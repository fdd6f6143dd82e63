"""Nodes of the directory are away, or refuse, as a peer starts. The peer meets them later, or goes
in through others."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.node import DHTProtocol
from p2p_dtfm.net.directory.values import Presence, sign_run
from p2p_dtfm.net.hivemind_parts import dht_pb2, get_dht_time
from p2p_dtfm.net.libp2p.host import Host
from tests.core.builders import run_spec
from tests.net.net_support import LOOPBACK, hosts, run, until

SPEC = run_spec().canonical_bytes()
RUN = digest_bytes(SPEC)


def test_a_node_that_was_away_at_the_start_is_met_once_it_is_there(tmp_path: Path) -> None:
    """After a power cut that also took the bootstrap node, the first peer to come back never called
    it. Whoever looked there for the run found nobody, and founded it a second time."""

    async def scenario() -> None:
        key = tmp_path / "bootstrap.key"
        node = await Host.start(key, LOOPBACK)
        (at,) = await node.addresses()
        await node.close()
        member = await Host.start(tmp_path / "member.key", LOOPBACK)
        member.calling.trusts = member.calling.vouched.__contains__
        directory = await Directory.start(member, ())
        gone = Identity.load_or_create(tmp_path / "gone.key").peer_id
        own = await member.addresses()
        directory.call_again_at([at, f"/ip4/127.0.0.1/tcp/9/p2p/{gone}", *own])
        assert member.peer_id not in member.calling.vouched
        signed = sign_run(SPEC, member.peer_id, member.identity.sign)
        again = await Host.start(key, [at.partition("/p2p/")[0]])
        try:
            there = await Directory.start(again)
            assert await directory.meet_again()
            assert await directory.publish_run(RUN, signed)
            await directory.publish_presence(Presence(member.peer_id, 1, own, RUN))
            assert [it.peer_id for it in await there.present_peers(RUN)] == [member.peer_id]
            known = there._node.protocol.whereabouts._said
            assert known[member.peer_id], "it can say where the member is"
        finally:
            await asyncio.gather(member.close(), again.close())

    run(scenario())


def _refusing(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, float]:
    """Nodes that begin from now on, and whose ids are put into the result, let nobody in, or have
    clocks this many seconds ahead."""
    answer, ahead_s = DHTProtocol.rpc_ping, dict[bytes, float]()

    async def rpc_ping(self: DHTProtocol, request: Any, context: Any) -> Any:
        own_s = ahead_s.get(self.node_id.to_bytes())
        if own_s is None or not request.validate:
            return await answer(self, request, context)
        time_s, is_wrong = get_dht_time() + own_s, own_s > 0
        return dht_pb2.PingResponse(peer=self.node_info, dht_time=time_s, available=is_wrong)

    monkeypatch.setattr(DHTProtocol, "rpc_ping", rpc_ping)
    monkeypatch.setattr("p2p_dtfm.net.directory.node.BOOTSTRAP_PAUSES_S", (0.05, 0.05))
    return ahead_s


CLOCK, KEEPS_TO_ITSELF = "clock", "keeps to its own run"


@pytest.mark.parametrize(("ahead_s", "why"), [(10.0, CLOCK), (0.0, KEEPS_TO_ITSELF)])
def test_one_that_refuses_keeps_nobody_from_a_directory_that_others_let_in_to(
    ahead_s: float,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An invitation names three members, one with a wrong clock. Everybody who came by it was told
    to set their own clock."""

    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (good, bad, late):
            refusing = _refusing(monkeypatch)
            there = [await Directory.start(host) for host in (good, bad)]
            refusing[there[1]._node.node_id.to_bytes()] = ahead_s
            through = [(await host.addresses())[0] for host in (good, bad)]
            joined = await Directory.start(late, through)
            assert good.peer_id in joined.nodes
            joined.call_again_at(through)  # as a daemon does, with whatever its user has named
            assert list(joined._initial) == [good.peer_id]
            assert bad.peer_id not in late.calling.vouched
            said = [it.getMessage() for it in caplog.records if it.levelno == logging.WARNING]
            assert [bad.peer_id in it and why in it for it in said] == [True]
            await joined.close()
            with pytest.raises(UserError, match=f"{bad.peer_id}: .*{why}") as error:
                await Directory.start(late, through[1:])
            told_of_clock = "set this machine's clock" in error.value.fixes[0]
            assert error.value.exit_code == 6 and told_of_clock == (why == CLOCK)

    run(scenario())


def test_where_all_refuse_each_is_told_of_and_no_clock_blamed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (wrong, closed, late):
            refusing = _refusing(monkeypatch)
            for host, ahead_s in ((wrong, 10.0), (closed, 0.0)):
                refusing[(await Directory.start(host))._node.node_id.to_bytes()] = ahead_s
            through = [(await host.addresses())[0] for host in (wrong, closed)]
            with pytest.raises(UserError) as error:
                await Directory.start(late, through)
            said = error.value
            assert f"{wrong.peer_id}: its {CLOCK}" in said.cause
            assert f"{closed.peer_id}: it cannot connect back" in said.cause
            assert "this machine's clock" not in " ".join(said.fixes)

    run(scenario())


def test_members_that_have_lost_all_nodes_meet_one_another_again(tmp_path: Path) -> None:
    """The members' first node was gone for good, and they had no network for half a minute. Each
    was a directory of its own from then on."""

    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (first, one, two):
            stranger = first.peer_id
            for host in (one, two):
                host.calling.trusts = lambda peer_id: peer_id != stranger
            directories = [await Directory.start(host, ()) for host in (one, two)]
            assert not directories[0].nodes
            assert not await directories[0].meet_again(), "no initial peer answers"
            for directory, other in zip(directories, (two, one), strict=True):
                await until(lambda it=directory, at=other: it.nodes == (at.peer_id,), "they meet")

    run(scenario())
