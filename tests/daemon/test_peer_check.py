"""What the doctor says of initial peers: of one that is not reached, and of several that are."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.daemon.peers import peer_check
from p2p_dtfm.daemon.peers.checks.check import Grade
from p2p_dtfm.daemon.peers.doctor import check_initial_peers
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from tests.daemon.test_false_leads import complete
from tests.net.net_support import hosts, run


def test_who_may_call_nobody_outside_does_not_look_for_it_on_the_other_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a company's firewall the user was told to open the other side's."""

    async def dropped(*arguments: object) -> Any:
        raise TimeoutError

    monkeypatch.setattr("asyncio.open_connection", dropped)
    at = "/ip4/192.0.2.7/tcp/31330"
    error = Unreachable("peer", "no answer")
    cause, fix = asyncio.run(peer_check._why_not(f"{at}/p2p/peer", at, "peer", error))
    assert "does not answer on TCP port 31330" in cause
    assert "on 192.0.2.7, open TCP port 31330" in fix
    assert "or your own network lets no such calls out" in fix


def test_of_several_that_answer_all_are_asked(tmp_path: Path) -> None:
    """An invitation names two addresses of its maker, and other members. At the second one that
    answered the doctor said that libp2p is broken, and is to be installed again."""

    async def has_no_run(sender: str, body: bytes) -> bytes:
        raise PeerFault("takes part in no run yet")

    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (doctor, *others):
            addresses = []
            for host in others:
                await ControlPlane(host, has_no_run, name="control").ready()
                addresses += await host.addresses()
            addresses.append(addresses[0])
            checks = await check_initial_peers(doctor, addresses)
            found = [check.found for check in checks if check.name == "initial peer"]
            assert len(found) == len(addresses) and all("no run yet" in it for it in found)

    run(scenario())


def test_whose_run_is_complete_is_not_said_to_train_it(tmp_path: Path) -> None:
    """The doctor said that step 61 of 60 is trained, and how much this machine would add. Who
    joined was then told that the run is complete."""

    async def is_done(sender: str, body: bytes) -> bytes:
        return encode(msgspec.structs.replace(complete(), protocol_version=PROTOCOL_VERSION))

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (doctor, other):
            await ControlPlane(other, is_done, name="control").ready()
            (check, *_) = await check_initial_peers(doctor, (await other.addresses())[:1])
            assert check.verdict is Grade.WARNING and not check.facts["complete"]  # not shown
            assert "is complete" in check.found and "trains" not in check.found and check.fix

    run(scenario())
