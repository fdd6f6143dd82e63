"""A peer of the attacker's own: a key, a host that speaks the wire, and as many identities as it
likes."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Contribution,
    Gather,
    JoinRequest,
    Ready,
    sign_contribution,
)
from p2p_dtfm.core.messages.statements import members_digest, stated
from p2p_dtfm.core.protocol.canonical import decode, digest_bytes
from p2p_dtfm.core.protocol.records import (
    PROTOCOL_VERSION,
    Device,
    Intent,
    LayerTiming,
    PeerRecord,
    Reachability,
    sign_record,
)
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed, signing_in
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.daemon.peers.wire import AGREEMENT, Hello, Message, Welcome, pack, unpack
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
CALL_S = 5.0
Make = Callable[[Gather], Contribution]


@dataclass
class Stranger:
    """A stranger that knows one member, and through it the others."""

    host: Host
    control: ControlPlane
    member: str
    run_digest: str
    spec: RunSpec
    peers: tuple[str, ...]
    view: tuple[int, str]
    """Number and snapshot of the members' view, as anybody can see them."""
    addresses: tuple[str, ...]
    folder: Path
    first_address: str
    heard: list[tuple[str, AgreementMessage]] = field(default_factory=list)

    @classmethod
    async def start(cls, folder: Path, address: str, view: tuple[int, str]) -> "Stranger":
        host = await Host.start(folder / "stranger.key", LOOPBACK, initial_peers=[address])
        heard: list[tuple[str, AgreementMessage]] = []

        async def answer(sender: str, body: bytes) -> bytes:
            _, message, _ = unpack(body)
            if isinstance(message, AGREEMENT):
                heard.append((sender, message))
            return b""

        control = await ControlPlane(host, answer).ready()
        member = address.rsplit("/", 1)[1]
        hello = pack(1, Hello(PROTOCOL_VERSION, await host.addresses()))
        welcome = decode(await control.call(member, hello, CALL_S), Welcome)
        payload = welcome.run_spec.payload
        spec = RunSpec.from_canonical_bytes(payload)
        peers = tuple(sorted({member, *(peer.peer_id for peer in welcome.peers)}))
        for peer in welcome.peers:
            with contextlib.suppress(Unreachable):
                await host.connect(peer.peer_id, list(peer.addresses), CALL_S)
        digest, addresses = digest_bytes(payload), await host.addresses()
        return cls(
            host, control, member, digest, spec, peers, view, addresses, folder, address, heard
        )

    @property
    def me(self) -> Member:
        return Member(self.host.peer_id, 1)

    def sign(self, payload: bytes) -> bytes:
        """Sign what is said within the run."""
        return signing_in(self.run_digest, self.host.identity.sign)(payload)

    async def say(self, message: Message, to: str | None = None) -> str:
        """The member's answer: the refusal, or nothing."""
        try:
            await self.control.call(to or self.member, pack(1, message), CALL_S)
        except (Refused, Unreachable) as error:
            return error.cause
        return ""

    async def say_to_all(self, message: Message) -> None:
        await asyncio.gather(*(self.say(message, peer_id) for peer_id in self.peers))

    def record_of(self, identity: Identity, addresses: tuple[str, ...], padding: int = 0) -> Signed:
        timing = LayerTiming(2_000_000, 4_000_000)
        device = Device("cpu", "x" * (padding or 4), 1 << 34, timing, timing, timing)
        record = PeerRecord(
            identity.peer_id, 1, 1, PROTOCOL_VERSION, self.run_digest, device, 0, 0, {},
            addresses, Reachability.DIRECT, Intent.TRAIN,
        )  # fmt: skip
        return sign_record(record, signing_in(self.run_digest, identity.sign))

    async def ask_to_join(self) -> str:
        record = self.record_of(self.host.identity, self.addresses)
        return await self.say(JoinRequest(record))

    async def take_part(self, seconds: float, make: Make | None, ready: bool) -> int:
        """Ask to be let in, and answer each Gather with the result of `make` (None: with silence).
        With `ready` each Ready is answered with its own. Returns how often the stranger was
        asked."""
        asked, seen = 0, {}
        end_s = time.monotonic() + seconds
        await self.ask_to_join()
        while time.monotonic() < end_s:
            heard = list(self.heard)
            self.heard.clear()
            for sender, message in heard:
                if isinstance(message, Gather) and make is not None:
                    asked += 1
                    key = (message.number, message.planned)
                    if key not in seen:
                        contribution = make(message)
                        seen[key] = sign_contribution(contribution, self.sign)
                    own = Gather(
                        self.me, message.number, message.planned, message.base, len(seen),
                        (seen[key],), message.absent, message.digest,
                    )  # fmt: skip
                    await self.say(own, sender)
                elif isinstance(message, Ready) and ready:
                    mine = Ready(self.me, message.view, "e" * 64, members_digest((self.me,)))
                    await self.say(stated(mine, self.sign), sender)
            await asyncio.sleep(0.05)
        return asked


def invented() -> Identity:
    return Identity(Ed25519PrivateKey.generate())
