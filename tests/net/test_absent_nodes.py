"""Nodes of the directory that are away, or refuse, as a peer starts: it meets them, or goes in
through others."""

import asyncio
from pathlib import Path

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.values import Presence, sign_run
from p2p_dtfm.net.libp2p.host import Host
from tests.core.builders import run_spec
from tests.net.net_support import LOOPBACK, run

SPEC = run_spec().canonical_bytes()
RUN = digest_bytes(SPEC)


def test_a_node_that_was_away_at_the_start_is_met_once_it_is_there(tmp_path: Path) -> None:
    """After a power cut that took both the bootstrap node was never called by who was back first:
    who looked there for the run found nobody, and founded it a second time."""

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
