"""Direct lines: whom TLS lets in, who waits at the door, and how lanes move to them."""

import asyncio
import contextlib
import contextvars
import datetime
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed
from p2p_dtfm.net.direct import card as cards
from p2p_dtfm.net.direct import reception as reception_of_lines
from p2p_dtfm.net.direct.card import Card, OwnCard, read_card
from p2p_dtfm.net.direct.handshake import FOR_LANES, call_out, shake_hands
from p2p_dtfm.net.direct.line import DirectLine
from p2p_dtfm.net.direct.lines import FIRST_PAUSE_S, DirectLines
from p2p_dtfm.net.direct.reception import WAITING_LIMIT
from p2p_dtfm.net.direct.sealed import PIECE_BYTES, SealedSocket
from p2p_dtfm.net.direct.trust import Trust
from p2p_dtfm.net.door import OpenDoor
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.shaping import LineLimit
from p2p_dtfm.net.streams import bulk
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkLimits, BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, FrameLimits
from p2p_dtfm.net.streams.incoming import LANES
from p2p_dtfm.net.streams.wire import LineWay, LineWire
from p2p_dtfm.ports import now
from p2p_dtfm.ports.now import MachineClock
from tests.net.net_support import LOOPBACK, hosts, run, until

MIB = 1 << 20
RUN = "aa" * 32


def _header(payload_bytes: int, index: int = 0) -> FrameHeader:
    shape = (payload_bytes // 4,)
    return FrameHeader(1, "ab", 2, FrameKind.ACTIVATION, index, 0, "fp32", "float32", shape)


class _Peer:
    """A plane with direct lines; it keeps what it is given."""

    def __init__(self, host: Host, run_digest: str = RUN, **limits: int) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.faults: list[PeerFault] = []
        self.lost: list[str] = []
        self.undelivered: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.host = host
        self.lines = DirectLines(host, run_digest, LOOPBACK, stall_s=limits.get("stall_s", 60))
        listeners = BulkListeners(
            self._take,
            lambda sender, fault: self.faults.append(fault),
            lambda peer, lane, error: self.lost.append(error.cause),
            lambda peer, lane, failure, views: self.undelivered.append(failure.cause),
        )
        limits_of = BulkLimits(FrameLimits(payload_bytes=32 * MIB), **limits)
        self.plane = BulkPlane(host, run_digest, listeners, limits_of, self.lines)

    async def _take(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        await self.gate.wait()
        if header.index == 666:
            raise PeerFault("nobody asked for this tensor")
        self.frames.append((header.index, bytes(payload)))

    async def direct(self, to: Host, lane: str = "forward") -> None:
        """Wait until a lane has moved."""
        await self.plane.send(to.peer_id, lane, _header(4, 1_000), bytes(4))
        await until(lambda: self.plane.is_direct(to.peer_id, lane), "the lane moves")


@contextlib.asynccontextmanager
async def _pair(folder: Path, **limits: int) -> AsyncIterator[tuple[_Peer, _Peer]]:
    async with hosts(folder, 2) as (one, two):
        peers = _Peer(one, **limits), _Peer(two, **limits)
        for peer in peers:
            await peer.plane.ready()
        try:
            yield peers
        finally:
            for peer in peers:
                await peer.plane.close()


def test_a_lane_moves_to_a_direct_line_while_frames_flow_and_none_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            sizes = [0, 4, 400_000, 3 * MIB, PIECE_BYTES, 64]
            sent: list[bytes] = []
            to = b.host.peer_id
            while not a.plane.is_direct(to, "forward"):
                assert len(sent) < 3_000, "the lane does not move"
                sent.append(os.urandom(sizes[len(sent) % len(sizes)]))
                header = _header(len(sent[-1]), len(sent) - 1)
                await a.plane.send(to, "forward", header, bytearray(sent[-1]))
            before = len(sent)
            assert before, "the first frames did not wait for the direct line"
            for _ in range(12):
                sent.append(os.urandom(sizes[len(sent) % len(sizes)]))
                header = _header(len(sent[-1]), len(sent) - 1)
                await a.plane.send(to, "forward", header, bytearray(sent[-1]))
            await a.plane.flush(to, "forward")
            assert b.frames == list(enumerate(sent)), "each frame once, whole and in its order"
            assert not (a.lost or b.lost or a.faults or b.faults or a.undelivered)
            # the next lane knows that direct lines work
            await a.plane.send(to, "reduce", _header(4), bytes(4))
            assert a.plane.is_direct(to, "reduce")
            assert a.plane.carriers() == {to: {"forward": "line", "reduce": "line"}}

    run(scenario())


def test_a_lane_that_was_too_busy_to_move_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each frame of such a lane had another line opened, which ended with its thread."""
    monkeypatch.setattr(bulk, "QUIET_S", 0.1)
    monkeypatch.setattr(bulk, "MOVE_PAUSE_S", 5.0)

    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            opened: list[DirectLine] = []
            open_line, to = a.lines.open, b.host.peer_id

            async def count(peer_id: str) -> DirectLine:
                opened.append(await open_line(peer_id))
                return opened[-1]

            a.lines.open = count  # type: ignore[method-assign]
            b.gate.clear()
            index = 0
            while index < 5 or not (opened and opened[0]._closing):
                await a.plane.send(to, "forward", _header(4, index), bytes(4))
                index += 1
                await asyncio.sleep(0.05)
            assert len(opened) == 1
            b.gate.set()
            await a.plane.flush(to, "forward")
            assert not a.plane.is_direct(to, "forward")
            await until(lambda: not a.plane._moving, "the pause ends")
            await a.direct(b.host)
            assert len(opened) == 2

    run(scenario())


@pytest.mark.parametrize("worked_before", [False, True])
def test_lines_that_the_other_end_cannot_keep_are_not_made_for_each_frame(
    tmp_path: Path, worked_before: bool
) -> None:
    """TLS lets them in, and then the other end has no thread left for them. Each frame had both
    ends shake hands again, and waited until all before it was acknowledged."""

    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            made, open_line, to = 0, a.lines.open, b.host.peer_id

            async def count(peer_id: str) -> DirectLine:
                nonlocal made
                line = await open_line(peer_id)
                made += 1
                return line

            def take(peer_id: str, connection: SealedSocket) -> None:
                connection.close()
                raise OSError("no thread is left")

            if worked_before:
                await a.direct(b.host, "state")
            a.lines.open = count  # type: ignore[method-assign]
            b.lines._take = take  # type: ignore[method-assign]
            for index in range(40):
                await a.plane.send(to, "forward", _header(4, index), bytes(4))
                await asyncio.sleep(0.02)
            await a.plane.flush(to, "forward")
            assert b.frames[-40:] == [(index, bytes(4)) for index in range(40)]
            assert not a.plane.is_direct(to, "forward")
            assert made == 1

    run(scenario())


def test_lanes_that_are_let_in_nowhere_at_once_count_once(tmp_path: Path) -> None:
    """Each of four lanes to one peer doubled the pause: four minutes in place of half a one."""

    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            to = b.host.peer_id
            opened = await asyncio.gather(*(a.lines.open(to) for _ in LANES))
            for _ in LANES:
                a.lines.let_nobody_in(to)
            tries = a.lines._tries[FOR_LANES][to]
            assert tries.failures == 1
            assert tries.not_before_s - now.monotonic_s() <= FIRST_PAUSE_S
            for line in opened:
                line.close()

    run(scenario())


def test_a_payload_is_its_owners_again_once_it_is_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            await a.direct(b.host)
            buffer = bytearray(3 * MIB)
            for index in range(8):
                buffer[:] = bytes([index]) * len(buffer)
                await a.plane.send(b.host.peer_id, "forward", _header(len(buffer), index), buffer)
            buffer[:] = b"x" * len(buffer)
            await a.plane.flush(b.host.peer_id, "forward")
            whole = [frame for frame in b.frames if frame[0] < 8]
            assert whole == [(index, bytes([index]) * len(buffer)) for index in range(8)]

    run(scenario())


def test_what_was_not_taken_when_a_line_breaks_is_told_and_libp2p_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            await a.direct(b.host)
            await a.plane.flush(b.host.peer_id, "forward")
            b.gate.clear()
            await a.plane.send(b.host.peer_id, "forward", _header(4, 1), bytes(4))
            for line in list(b.lines._lines):
                line.close()
            await until(lambda: bool(a.undelivered), "its sender hears of the lost frame")
            b.gate.set()
            await a.plane.send(b.host.peer_id, "forward", _header(4, 2), bytes(4))
            assert not a.plane.is_direct(b.host.peer_id, "forward"), "not at once again"
            await a.plane.flush(b.host.peer_id, "forward")
            assert b.frames[-1][0] == 2

    run(scenario())


def test_a_slow_receiver_holds_its_sender_back_and_a_refusal_comes_with_its_reason(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path, window_bytes=2 * MIB) as (a, b):
            await a.direct(b.host, "state")
            await a.plane.flush(b.host.peer_id, "state")
            b.gate.clear()
            sent = []

            async def flood() -> None:
                for index in range(8):
                    await a.plane.send(b.host.peer_id, "state", _header(MIB, index), bytes(MIB))
                    sent.append(index)

            flooding = asyncio.create_task(flood())
            await until(lambda: len(sent) >= 1, "the first frame is written")
            await asyncio.sleep(0.2)
            assert len(sent) <= 2 and not flooding.done()
            b.gate.set()
            await flooding
            await a.plane.flush(b.host.peer_id, "state")
            with pytest.raises(PeerFault, match="nobody asked for this tensor"):
                for index in (666, *range(100)):
                    await a.plane.send(b.host.peer_id, "state", _header(4, index), bytes(4))
                    await a.plane.flush(b.host.peer_id, "state")
            assert [fault.cause for fault in b.faults] == ["nobody asked for this tensor"]

    run(scenario())


def test_a_receiver_that_lives_and_waits_for_room_breaks_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stall_s, waits_s, size = 3, 2.1, 24 * MIB
    monkeypatch.setattr(reception_of_lines, "BEYOND_STALL_S", 1.0)

    async def scenario() -> None:
        async with _pair(tmp_path, stall_s=stall_s) as (a, b):
            await a.direct(b.host)
            to = b.host.peer_id
            await a.plane.flush(to, "forward")
            b.gate.clear()
            await a.plane.send(to, "forward", _header(4, 1), bytes(4))
            sending = asyncio.create_task(
                a.plane.send(to, "forward", _header(size, 2), bytes(size))
            )
            await asyncio.sleep(waits_s)
            assert not sending.done(), "more than the kernels of both ends take"
            b.gate.set()
            await sending
            await a.plane.flush(to, "forward")
            assert [index for index, _ in b.frames[-2:]] == [1, 2]
            assert a.plane.is_direct(to, "forward") and not (a.lost or b.lost or a.undelivered)

    run(scenario())


# whom TLS lets in --------------------------------------------------------------------------------


def _handshake(server: Trust, client: Trust) -> str | None:
    """Shake hands over a pair of sockets. Returns whom the server sees; raises `ssl.SSLError`."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    ends = [server.wrap(ours, True), client.wrap(theirs, False)]
    try:
        done = [False, False]
        for _ in range(20):
            for number, end in enumerate(ends):
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
                    done[number] = True
        assert all(done)
        return server.owner_of(ends[0])
    finally:
        for end in ends:
            end.close()


def _trusts(*seeds: int, run_digest: str = RUN) -> tuple[list[Identity], list[Trust]]:
    identities = [identity_of_seed(bytes([seed]) * 32) for seed in seeds]
    return identities, [Trust(identity, run_digest) for identity in identities]


def _meet(identities: list[Identity], trusts: list[Trust]) -> None:
    for trust in trusts:
        for identity, other in zip(identities, trusts, strict=True):
            if other is not trust:
                trust.add(identity.peer_id, other.own().card)


def test_tls_lets_in_who_has_shown_its_certificate_and_nobody_else() -> None:
    identities, (server, client) = _trusts(1, 2)
    _meet(identities, [server, client])
    assert _handshake(server, client) == identities[1].peer_id

    _, (stranger,) = _trusts(3)
    stranger.add(identities[0].peer_id, server.own().card)
    with pytest.raises(ssl.SSLError):  # the server has never seen its certificate
        _handshake(server, stranger)

    _, (same_peer_other_key,) = _trusts(2)
    same_peer_other_key.add(identities[0].peer_id, server.own().card)
    with pytest.raises(ssl.SSLError):
        _handshake(server, same_peer_other_key)

    _, (impostor,) = _trusts(4)
    with pytest.raises(ssl.SSLError):  # the client knows whom it calls
        _handshake(impostor, client)

    server.drop(identities[1].peer_id)
    with pytest.raises(ssl.SSLError):  # this peer is a member no more
        _handshake(server, client)


def test_a_certificate_that_was_replaced_or_is_over_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identities, (server, client) = _trusts(1, 2)
    _meet(identities, [server, client])
    _, (after,) = _trusts(2)
    server.add(identities[1].peer_id, after.own().card)
    with pytest.raises(ssl.SSLError):
        _handshake(server, client)

    _, (late,) = _trusts(2)
    monkeypatch.setattr(cards, "LIVES_S", -60)
    old = OwnCard(identities[1], RUN, 0, time.time())
    late._own = old
    late.add(identities[0].peer_id, server.own().card)
    server.add(identities[1].peer_id, old.card)
    with pytest.raises(ssl.SSLError, match="expired"):
        _handshake(server, late)


def test_a_clock_that_is_set_right_leaves_no_certificate_of_the_future() -> None:
    """The clock was years ahead when the machine started. Until then all others would refuse that
    certificate."""

    class Set(MachineClock):
        ahead_s = 0.0

        def wall_ns(self) -> int:
            return super().wall_ns() + int(self.ahead_s * 1e9)

    def scenario() -> None:
        clock = Set()
        now.live_by(clock)
        for ahead_s in (10 * 365 * 86_400.0, 3 * 3_600.0, -40 * 365 * 86_400.0):
            clock.ahead_s = ahead_s
            (one, _), (trust, _) = _trusts(1, 2)
            before = trust.own().card
            clock.ahead_s = 0.0
            card = trust.own().card
            assert card != before
            assert read_card(encode(card), one.peer_id, RUN, time.time()) == card
        clock.ahead_s = -60.0
        assert trust.own().card == card, "a minute is nothing"

    contextvars.copy_context().run(scenario)


def test_tls_1_2_is_refused() -> None:
    identities, (server, client) = _trusts(1, 2)
    _meet(identities, [server, client])
    client.own()
    old = client._context(False)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    client._contexts = (old, old)
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        _handshake(server, client)


def test_a_card_is_its_senders_of_this_run_and_neither_old_nor_for_ever() -> None:
    one, two = identity_of_seed(b"1" * 32), identity_of_seed(b"2" * 32)
    now_s = datetime.datetime(2026, 5, 1).timestamp()
    good = OwnCard(one, RUN, 4002, now_s).card

    def read(card: Card, sender: str = one.peer_id, at_s: float = now_s) -> Card:
        return read_card(msgspec.msgpack.encode(card), sender, RUN, at_s)

    assert read(good) == good
    with pytest.raises(PeerFault, match="not signed"):
        read(good, two.peer_id)
    with pytest.raises(PeerFault, match="not signed"):
        read(msgspec.structs.replace(good, port=4003))
    with pytest.raises(PeerFault, match="not signed"):
        other = OwnCard(one, RUN, 4002, now_s).card
        read(msgspec.structs.replace(good, certificate=other.certificate))
    with pytest.raises(PeerFault, match="another run"):
        read(OwnCard(one, "bb" * 32, 4002, now_s).card)
    with pytest.raises(PeerFault, match="port 22"):
        read(OwnCard(one, RUN, 22, now_s).card)
    with pytest.raises(PeerFault, match="too old"):
        read(good, at_s=now_s + 8 * 86_400)
    with pytest.raises(PeerFault, match="too old, or lives too long"):
        read(OwnCard(one, RUN, 4002, now_s + 3 * 86_400).card)
    with pytest.raises(PeerFault, match="another peer has shown"):
        trust = Trust(two, RUN)
        trust.add(one.peer_id, good)
        trust.add(two.peer_id, good)
    for body in (b"", b"\x00" * 40, b"\xc1" * 3_000, msgspec.msgpack.encode(good)[:-1]):
        with pytest.raises(PeerFault):
            read_card(body, one.peer_id, RUN, now_s)


def _card_in_the_name_of(name: x509.Name, of: Identity, garbled: bool = False) -> Card:
    """A card for a certificate as its builder makes it, under a name that the member has chosen."""
    key, at = Ed25519PrivateKey.generate(), datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(at)
        .not_valid_after(at + datetime.timedelta(days=7))
        .sign(key, None)
    )
    der = certificate.public_bytes(Encoding.DER)
    der = der.replace(b"no-unicode", b"\xff" * 10) if garbled else der
    card = Card(cards.CARD_VERSION, RUN, der, 4002, b"")
    return msgspec.structs.replace(card, signature=of.sign(cards._signed(card)))


def test_one_members_card_keeps_nobody_from_another() -> None:
    """A certificate that its library reads and TLS does not made each context fail. Of two
    certificates with one name TLS finds the first."""
    identities, (server, client, _) = _trusts(1, 2, 3)
    bad = identities[2]
    garbled = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "no-unicode")])
    taken = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identities[1].peer_id)])
    both = x509.Name([*taken, x509.NameAttribute(NameOID.COMMON_NAME, bad.peer_id)])
    for name in (garbled, taken, both):
        card = _card_in_the_name_of(name, bad, name is garbled)
        with pytest.raises(PeerFault, match="a certificate"):
            read_card(msgspec.msgpack.encode(card), bad.peer_id, RUN, time.time())
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, bad.peer_id)])
    fine = _card_in_the_name_of(own, bad)
    assert read_card(msgspec.msgpack.encode(fine), bad.peer_id, RUN, time.time()) == fine

    server.add(bad.peer_id, _card_in_the_name_of(garbled, bad, garbled=True))  # however it came
    _meet(identities[:2], [server, client])
    assert _handshake(server, client) == identities[1].peer_id


# who waits at the door ---------------------------------------------------------------------------


def test_a_member_of_another_run_keeps_to_libp2p_and_is_refused_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = _Peer(one), _Peer(two, run_digest="bb" * 32)
            await a.plane.ready()
            await b.plane.ready()
            with pytest.raises(Unreachable, match="another run"):
                await a.lines.open(two.peer_id)
            assert not a.lines.wants(two.peer_id), "it is not tried again soon"
            await a.plane.close()
            await b.plane.close()

    run(scenario())


class _Door(OpenDoor):
    """A door that is open to all but the barred."""

    def __init__(self, *barred: str) -> None:
        self.barred = barred

    def is_near(self, sender: str) -> bool:
        return sender not in self.barred


def test_who_is_barred_gets_no_thread_loses_its_lines_and_is_forgotten_by_tls(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (two, one, three):
            a, b, c = _Peer(one), _Peer(two), _Peer(three)
            for peer in (a, b, c):
                await peer.plane.ready()
            for peer in (a, c):
                await peer.direct(b.host)
            held = {whose: line for line, whose in b.lines._lines.items()}
            b.host.door = _Door(one.peer_id)
            card = a.lines._trust.own().card
            raw = [socket.create_connection(("127.0.0.1", b.lines.port)) for _ in range(2)]
            for connection in raw:
                connection.setblocking(False)
            knocks = a.lines._trust.wrap(raw[0], is_server=False)
            await shake_hands(knocks)  # b's TLS has yet to hear that it is barred
            sealed = await call_out(knocks, FOR_LANES)
            await until(lambda: one.peer_id not in b.lines._lines.values(), "its lines end")
            assert not held[one.peer_id]._thread.is_alive()
            assert card.fingerprint not in b.lines._trust._owners
            # and now TLS itself refuses it
            again = a.lines._trust.wrap(raw[1], is_server=False)
            with pytest.raises(OSError):
                await shake_hands(again)
                await call_out(again, FOR_LANES)
            assert three.peer_id in b.lines._lines.values(), "others keep theirs"
            for end in (sealed, again):
                end.close()
            for peer in (a, b, c):
                await peer.plane.close()

    run(scenario())


class _Later(MachineClock):
    """This machine's clock, put forward."""

    ahead_s = 0.0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + int(self.ahead_s * 1e9)


def test_lanes_that_call_at_once_and_in_vain_are_one_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (host,):
            clock = _Later()
            now.live_by(clock)
            lines = DirectLines(host, RUN, LOOPBACK)
            for pause_s in (30, 60, 120):
                calls = [lines.open("12D3KooWNobody") for _ in range(4)]
                answers = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(answer, Unreachable) for answer in answers)
                clock.ahead_s += pause_s - 1
                assert not lines.wants("12D3KooWNobody"), f"before {pause_s} s"
                clock.ahead_s += 2
                assert lines.wants("12D3KooWNobody"), f"after {pause_s} s"

    run(scenario())


def test_a_call_that_takes_longer_than_its_lane_waits_is_a_failure(tmp_path: Path) -> None:
    """Otherwise the next frame would call again, and so on without a pause."""

    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (one,):
            lines, to = DirectLines(one, RUN, LOOPBACK), "somebody"

            async def forever(peer_id: str, purpose: bytes) -> None:
                await asyncio.Event().wait()

            lines._open = forever  # type: ignore[method-assign, assignment]
            assert lines.wants(to)
            with pytest.raises(Unreachable, match="no direct line within"):
                await LineWay(lines).open(to, "", 0.1)
            assert not lines.wants(to)

    run(scenario())


def test_a_host_whose_line_is_limited_keeps_to_libp2p(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            b.host.shaper = LineLimit(0, 0)
            await a.plane.send(b.host.peer_id, "forward", _header(4), bytes(4))
            await until(lambda: not a.lines.wants(b.host.peer_id), "a tried, and b refused")
            await a.plane.flush(b.host.peer_id, "forward")
            assert not a.plane.is_direct(b.host.peer_id, "forward")
            assert not b.lines.wants(a.host.peer_id)
            assert a.plane.carriers() == {b.host.peer_id: {"forward": "libp2p"}}

    run(scenario())


@pytest.mark.parametrize("size", [120, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_crowd_that_says_nothing_holds_up_nobody(tmp_path: Path, size: int) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            crowd = []
            for _ in range(size):
                silent = socket.socket()
                silent.setblocking(False)
                silent.bind(("127.0.0.2", 0))  # of its own host, a slow caller would be sent away
                silent.connect_ex(("127.0.0.1", b.lines.port))
                crowd.append(silent)
            began_s = time.monotonic()
            await a.plane.send(b.host.peer_id, "forward", _header(MIB), bytes(MIB))
            await a.plane.flush(b.host.peer_id, "forward")
            assert time.monotonic() - began_s < 2.0, "a step waits for them"
            reception = b.lines._reception
            assert reception is not None
            most = 0

            def came_through() -> bool:
                nonlocal most
                most = max(most, reception.waiting_count)
                return most >= WAITING_LIMIT and a.plane.is_direct(b.host.peer_id, "forward")

            await until(came_through, "many wait, and a is let in")
            assert most == WAITING_LIMIT, "few are let wait"
            await until(lambda: reception.waiting_count == 0, "all of them were sent away")
            for silent in crowd:
                silent.close()

    run(scenario())


def test_a_line_that_stops_inside_a_frame_is_dropped_within_a_bound(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path, stall_s=1) as (a, b):
            await a.direct(b.host)
            await a.plane.flush(b.host.peer_id, "forward")
            (stripe,) = a.plane._outgoing[b.host.peer_id, "forward"].stripes
            assert isinstance(stripe.wire, LineWire)
            line = stripe.wire.line
            began_s = time.monotonic()
            await line.write([b"DTFM\x01\x00"])
            await until(lambda: bool(b.lost), "b notices")
            assert time.monotonic() - began_s < 3.0
            assert not b.faults, "a slow line is no fault"

    run(scenario())


def test_who_shakes_hands_and_tells_no_secret_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception_of_lines, "HANDSHAKE_S", 1.0)

    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            await a.direct(b.host)
            reception = b.lines._reception
            assert reception is not None
            await until(lambda: reception.waiting_count == 0, "only the silent one is to wait")
            raw = socket.create_connection(("127.0.0.1", b.lines.port))
            raw.setblocking(False)
            silent = a.lines._trust.wrap(raw, is_server=False)  # a member, half-way in
            await shake_hands(silent)
            lines_before = len(b.lines._lines)
            await until(lambda: reception.waiting_count == 1, "it waits at the door")
            await until(lambda: reception.waiting_count == 0, "it is sent away")
            assert len(b.lines._lines) == lines_before
            silent.close()

    run(scenario())


def test_busy_ends_are_no_reason_for_more_lines(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path) as (a, b):
            await a.direct(b.host)
            lane = a.plane._outgoing[b.host.peer_id, "forward"]
            for stripe in lane.stripes:
                stripe.round_trip_s = 0.05  # so late a busy receiver acknowledged
            lane._growth._busy_s = 60.0
            await a.plane.send(b.host.peer_id, "forward", _header(MIB), bytes(MIB))
            await a.plane.flush(b.host.peer_id, "forward")
            assert lane._growing is None and len(lane.stripes) == 1
            round_trip_s = lane.stripes[0].wire.round_trip_s()
            assert round_trip_s is not None and round_trip_s < 0.01

    run(scenario())
