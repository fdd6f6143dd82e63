"""A stranger says what it likes to three daemons. None ends, none goes elsewhere, and all train
on."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.consensus.actions import ComputePlan, SendMessage
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.consensus.agreement_state import RunConstants
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    AgreementMessage,
    Gather,
    JoinRequest,
    Ready,
    Standing,
)
from p2p_dtfm.core.messages.statements import certified, members_digest, stated
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION, sign_record
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Sign, signing_in, verifying_in
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.daemon.peers.wire import AGREEMENT, Hello, KnownPeers, Welcome, pack, unpack
from p2p_dtfm.net.contacts.addresses import parse_address
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.core.builders import record
from tests.e2e.helpers import step_of, wait_until, write_endless_spec

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
LIES_S = 12.0


class Stranger:
    """A peer of the test's own that speaks the wire."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.me = Member(host.peer_id, 1)
        self.heard: list[tuple[str, AgreementMessage]] = []
        self.control: ControlPlane | None = None
        self.welcome: Welcome | None = None
        """What the stranger answers to those that look for a run."""
        self.asked = 0

    def sign_in(self, run_digest: str) -> Sign:
        return signing_in(run_digest, self.host.identity.sign)

    async def hear(self, sender: str, body: bytes) -> bytes:
        _, message, _ = unpack(body)
        if isinstance(message, AGREEMENT):
            self.heard.append((sender, message))
        if isinstance(message, Hello) and self.welcome is not None:
            self.asked += 1
            return encode(self.welcome)
        return b""

    async def say(self, peer_id: str, message: AgreementMessage) -> bytes:
        assert self.control is not None
        with contextlib.suppress(Refused, Unreachable):
            return await self.control.call(peer_id, pack(1, message), 5)
        return b""


async def forge(one: Stranger, peers: list[str], view: ViewId, run_digest: str) -> None:
    """Everything that a stranger can say without being a member."""
    fake, sign = ViewId(10**6, "f" * 64), one.sign_in(run_digest)
    ready = stated(Ready(one.me, fake, "e" * 64, members_digest((one.me,))), sign)
    proof = certified(fake, (one.me,), (ready,))
    standing = stated(Standing(one.me, proof, True, 10**9, run_digest, (view,)), sign)
    for peer_id in peers:
        for number in (2**64 - 2, 2**53 - 2, view.number // 2 * 2 + 2, view.number // 2 * 2 + 3):
            base = view if number % 2 == 0 else GENESIS
            planned = number % 2 == 0
            await one.say(peer_id, Gather(one.me, number, planned, base, 1, (), (), "0" * 64))
        for message in (standing, msgspec.structs.replace(standing, signature=b"")):
            await one.say(peer_id, message)
        for number in range(10):
            away = ViewId(10**9 + number, "f" * 64)
            await one.say(peer_id, stated(Active(one.me, away, 0), sign))


async def join_with_another_plan(one: Stranger, target: str, run_digest: str) -> int:
    """Take part honestly, then say Ready with a plan that nobody else has. Returns how often."""
    assert one.control is not None
    addresses, lies = await one.host.addresses(), 0
    hello = pack(1, Hello(PROTOCOL_VERSION, addresses))
    welcome = decode(await one.control.call(target, hello, 5), Welcome)
    spec = RunSpec.from_canonical_bytes(welcome.run_spec.payload)
    sign, is_signed = one.sign_in(run_digest), verifying_in(run_digest, verify)
    constants = RunConstants(run_digest, workload_of(spec), sign, is_signed, terms_of(spec))
    agreement = Agreement(one.me, constants)
    mine = record(one.host.peer_id, run_digest=run_digest, addresses=addresses)
    agreement.set_record(mine, sign_record(mine, sign))

    async def do(actions: list) -> None:  # type: ignore[type-arg]
        nonlocal lies
        for action in actions:
            if isinstance(action, SendMessage):
                await asyncio.gather(*(one.say(peer, action.message) for peer in action.to))
            elif isinstance(action, ComputePlan):
                lies += 1
                plan = NoPlan("I say so")
                now_ns = time.monotonic_ns()
                await do(agreement.plan_computed(action.snapshot, plan, now_ns))

    request = agreement.wants_view()
    assert isinstance(request, JoinRequest)
    reply = await one.say(target, request)
    for peer in decode(reply, KnownPeers).peers if reply else ():
        with contextlib.suppress(Unreachable):
            if peer.peer_id != one.host.peer_id:
                await one.host.connect(peer.peer_id, list(peer.addresses), 5)
    end_s = time.monotonic() + LIES_S
    while time.monotonic() < end_s and not lies:
        await asyncio.sleep(0.1)
        heard, one.heard = one.heard, []
        for sender, message in heard:
            await do(agreement.receive(sender, message, time.monotonic_ns()))
        await do(agreement.tick(time.monotonic_ns()))
    return lies


async def mislead(one: Stranger, member: str, join: Callable[[str], None]) -> None:
    """A daemon is told of this peer first, which says that the run is complete. To another daemon
    the peer says that the run is under way, and keeps back what belongs to it."""
    assert one.control is not None
    hello = pack(1, Hello(PROTOCOL_VERSION, await one.host.addresses()))
    true = decode(await one.control.call(member, hello, 5), Welcome)
    for step in (10**9, 1):
        one.welcome, one.asked = msgspec.structs.replace(true, step=step, peers=()), 0
        await asyncio.to_thread(join, (await one.host.addresses())[0])
        assert one.asked, "it was asked first"


def join_through(swarm: LocalSwarm, addresses: list[str]) -> None:
    """The stranger becomes a member, whichever daemon answers first."""
    more = [word for address in addresses[1:] for word in ("--initial-peers", address)]
    child = swarm.join(addresses[0], more)
    wait_until(lambda: step_of(child) >= 1, "is let in", 60)


@pytest.mark.nightly
def test_a_strangers_claims_and_another_plan_move_nobody(
    prepared_data: Path, tmp_path: Path
) -> None:
    spec = write_endless_spec(tmp_path, data={"source": str(prepared_data)})
    with LocalSwarm(tmp_path, ["--threads", "1"]) as swarm:
        founder, address = swarm.found(["--run", str(spec), "--expect-peers", "3"])
        for _ in range(2):
            swarm.join(address)
        wait_until(lambda: all(step_of(c) >= 3 for c in swarm.children), "all train")
        before = facts_of(founder)
        others = [facts_of(child)["peer_id"] for child in swarm.children]

        async def scenario() -> int:
            host = await Host.start(tmp_path / "evil.key", LOOPBACK, initial_peers=[address])
            try:
                one = Stranger(host)
                one.control = await ControlPlane(host, one.hear).ready()
                target = parse_address(address)[0]
                view = ViewId(before["view"], before["snapshot"])
                await forge(one, others, view, before["run_digest"])
                assert all(child.running for child in swarm.children)
                await mislead(one, target, lambda liar: join_through(swarm, [liar, address]))
                return await join_with_another_plan(one, target, before["run_digest"])
            finally:
                await host.close()

        lies = asyncio.run(scenario())
        step = step_of(founder)
        wait_until(lambda: all(step_of(c) > step + 5 for c in swarm.children), "all train on", 20)
        for child in swarm.children:
            log = (child.home / "stderr").read_text(errors="replace")
            assert "Traceback" not in log and "rejoins" not in log, log[-2000:]
        assert lies, "the newcomer had its say"
        # Each joiner among three costs an attempt or a few; what was claimed began at a million.
        views = {facts_of(child)["view"] for child in swarm.children}
        assert max(views) < before["view"] + 100


def facts_of(child: Child) -> dict:  # type: ignore[type-arg]
    facts = child.status()
    assert facts is not None
    return facts
