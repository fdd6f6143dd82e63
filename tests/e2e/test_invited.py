"""A run by invitation, with real daemons. An invited peer joins, a stranger learns nothing, and a
revoked peer goes and does not come back."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.daemon.peers.home_memory import read_memory
from p2p_dtfm.daemon.peers.wire import Hello, Introduction, Knock, pack
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import (
    logged,
    run_program,
    safe_of,
    shards_of,
    takes_part,
    wait_until,
    write_endless_spec,
)
from tests.e2e.test_coming_back import are_one_swarm, kill

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
SMALL = ("--threads", "1", "--dashboard", "off", "--no-nearby")


def invited(member: Child, *options: str) -> str:
    done = run_program("invite", "--home", member.home, "--json", *options)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)["line"]
    assert isinstance(line, str)
    return line


async def snoop(folder: Path, address: str, known: dict[str, Any]) -> list[bytes]:
    """Everything that a copy of this software gets out of a member, though it even knows the run
    and its data."""
    host = await Host.start(folder / "snoop.key", LOOPBACK, initial_peers=[address])
    member, got = address.rsplit("/", 1)[1], list[bytes]()

    async def answer(sender: str, body: bytes) -> bytes:
        got.append(body)
        return b""

    try:
        control = await ControlPlane(host, answer).ready()
        hello = Hello(PROTOCOL_VERSION, await host.addresses())
        for message in (hello, Knock(known["run_digest"]), Introduction(())):
            with contextlib.suppress(Refused, Unreachable):
                got.append(await control.call(member, pack(1, message), 5.0))
        blobs = BlobExchange(host, lambda digest: None)
        for digest in (known["manifest"], known["run_digest"]):
            with contextlib.suppress(BlobUnavailable):
                got.append(await blobs.fetch_bytes(digest, [member], 1 << 20))
        with contextlib.suppress(UserError):
            directory = await Directory.start(host, [address])
            present = await directory.present_peers(known["run_digest"])
            facts = await directory.facts_of(known["run_digest"], [member])
            got.append(repr((present, facts)).encode() if present or facts else b"")
            got.append(b"spec" if await directory.fetch_run(known["run_digest"]) else b"")
            await directory.close()
    finally:
        await host.close()
    return [each for each in got if each]


@pytest.mark.nightly
def test_invited_uninvited_and_revoked(tmp_path: Path) -> None:
    spec = write_endless_spec(tmp_path, admission={"mode": "invited"})
    with LocalSwarm(tmp_path, SMALL) as swarm:
        founder = swarm.start(["--run", str(spec)])
        wait_until(lambda: takes_part(founder), "the founder trains")
        assert "p2p-dtfm invite prints a line" in (founder.home / "stdout").read_text()
        (address, *_) = (founder.status() or {})["addresses"]
        line = invited(founder)
        looked = run_program("doctor", "--invite", line, "--home", tmp_path / "nobody")
        assert "its run is by invitation: its members tell only who has joined" in looked.stdout
        guest = swarm.start(["--invite", line])
        stranger = swarm.join(address)
        wait_until(lambda: not stranger.running, "who is not invited is refused")
        assert stranger.process.returncode == 5, stranger.log_tail()
        assert logged(stranger, "not invited: this run is by invitation")
        digest = (founder.status() or {})["run_digest"]
        kept = [path for path in stranger.home.rglob("*") if path.is_file()]
        assert not any(digest.encode() in path.read_bytes() for path in kept)
        (directory,) = (founder.home / "runs").iterdir()
        remembered = read_memory(directory)
        assert remembered is not None
        known = {"run_digest": digest, "manifest": remembered.spec.data.manifest}
        got = asyncio.run(asyncio.wait_for(snoop(tmp_path, address, known), 60))
        assert got == [], "whoever is not invited gets no word but why"
        wait_until(lambda: takes_part(guest), "who is invited takes part")

        facts = guest.status() or {}
        refused = run_program("invite", "--home", guest.home)
        assert refused.returncode == 2 and "may not invite others" in refused.stderr
        done = run_program("revoke", facts["peer_id"], "--home", founder.home)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not guest.running, "who is revoked goes")
        assert guest.process.returncode == 5, guest.log_tail()
        assert logged(guest, "the invitation was revoked by the founder")
        wait_until(
            lambda: len((founder.status() or {"members": ()})["members"]) == 1, "a view without it"
        )
        views = [each for each in founder.events() if each["event"] == "view"]
        again = swarm.start([], home=guest.home)
        wait_until(lambda: not again.running, "nor does it come back")
        assert again.process.returncode == 5, again.log_tail()
        assert len(views) <= 4, "one view to let it in, one without it"


@pytest.mark.nightly
def test_a_line_works_while_one_member_lives_and_the_founder_comes_back(tmp_path: Path) -> None:
    line = ["--run", str(write_endless_spec(tmp_path, admission={"mode": "invited"}))]
    with LocalSwarm(tmp_path, SMALL) as swarm:
        founder = swarm.start(line)
        wait_until(lambda: takes_part(founder), "the founder trains")
        guest = swarm.start(["--invite", invited(founder, "--may-invite")])
        wait_until(lambda: takes_part(guest), "the guest trains")
        joined_at = next(it["step"] for it in guest.events() if it["event"] == "view")
        # the guest may be a spare; until it has copies the founder's death takes the layers along
        wait_until(lambda: safe_of(founder) >= joined_at, "what the founder has is there twice")
        # a spare fetches layers ahead of need; one that is left without them waits for the founder
        wait_until(lambda: shards_of(guest) == shards_of(founder), "the data are there twice")
        before = invited(founder)
        kill(founder)
        wait_until(lambda: len((guest.status() or {})["members"]) == 1, "the guest is alone")
        third = swarm.start(["--invite", before])
        wait_until(lambda: takes_part(third), "the founder's line leads in, through the guest")
        again = swarm.start(line, home=founder.home)
        everyone = [again, guest, third]
        wait_until(lambda: are_one_swarm(everyone), "the founder is back in its run")
        fourth = swarm.start(["--invite", invited(guest)])
        wait_until(lambda: are_one_swarm([*everyone, fourth]), "a guest's guest joins")
        kill(third)
        third = swarm.start([], home=third.home)
        wait_until(
            lambda: are_one_swarm([again, guest, third, fourth]), "who has joined comes back"
        )
