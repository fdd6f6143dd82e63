"""The messenger delivers all messages, several at once, and forgets idle peers."""

import asyncio
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.daemon.peers import messenger as messenger_module
from p2p_dtfm.daemon.peers import wire
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import Hello, Message, unpack
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.libp2p.port import HostPort

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


async def until(condition, what: str) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


def test_all_messages_come_and_idle_workers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messenger_module, "IDLE_S", 0.2)

    async def scenario() -> None:
        one = await Host.start(tmp_path / "one.key", LOOPBACK)
        two = await Host.start(tmp_path / "two.key", LOOPBACK)
        heard: list[int] = []

        async def hear(sender: str, body: bytes) -> bytes:
            _, message, _ = unpack(body)
            assert isinstance(message, Hello)
            heard.append(message.protocol_version)
            return b""

        try:
            await ControlPlane(two, hear).ready()
            messenger = Messenger(one, await ControlPlane(one, hear).ready(), life=1)
            messenger.learn(two.peer_id, await two.addresses())
            for round_start in (0, 10):
                for number in range(round_start, round_start + 10):
                    messenger.tell(two.peer_id, Hello(number, ()))
                assert len(messenger._workers) == 1
                await until(lambda end=round_start: len(heard) == end + 10, "all arrive")
                await until(lambda: not messenger._workers, "the worker ends")
                assert not messenger._queues
            assert sorted(heard) == list(range(20))
            await messenger.close()
        finally:
            await asyncio.gather(one.close(), two.close())

    asyncio.run(scenario())


def test_what_was_told_before_the_end_still_arrives(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = await Host.start(tmp_path / "one.key", LOOPBACK)
        two = await Host.start(tmp_path / "two.key", LOOPBACK)
        heard: list[bytes] = []

        async def hear_slowly(sender: str, body: bytes) -> bytes:
            await asyncio.sleep(0.2)
            heard.append(body)
            return b""

        try:
            await ControlPlane(two, hear_slowly).ready()
            messenger = Messenger(one, await ControlPlane(one, hear_slowly).ready(), life=1)
            messenger.learn(two.peer_id, await two.addresses())
            messenger.tell(two.peer_id, Hello(1, ()))
            messenger.tell(two.peer_id, Hello(2, ()))
            await messenger.close()
            assert len(heard) == 2
        finally:
            await asyncio.gather(one.close(), two.close())

    asyncio.run(scenario())


def test_what_is_not_answered_yet_is_not_said_again(tmp_path: Path) -> None:
    """On a machine that 32 daemons shared, the messages that were repeated each half second piled
    up."""

    async def scenario() -> None:
        one = await Host.start(tmp_path / "one.key", LOOPBACK)
        two = await Host.start(tmp_path / "two.key", LOOPBACK)
        heard: list[int] = []
        answer = asyncio.Event()

        async def hear(sender: str, body: bytes) -> bytes:
            _, message, _ = unpack(body)
            assert isinstance(message, Hello)
            heard.append(message.protocol_version)
            await answer.wait()
            return b""

        try:
            await ControlPlane(two, hear).ready()
            messenger = Messenger(one, await ControlPlane(one, hear).ready(), life=1)
            messenger.learn(two.peer_id, await two.addresses())
            for _ in range(3):
                messenger.tell(two.peer_id, Hello(1, ()))
            await until(lambda: heard == [1], "it has come")
            messenger.tell(two.peer_id, Hello(1, ()))
            messenger.tell(two.peer_id, Hello(2, ()))
            answer.set()
            await until(lambda: heard == [1, 2], "another one comes, and the first one once")
            messenger.tell(two.peer_id, Hello(1, ()))
            await until(lambda: heard == [1, 2, 1], "what was answered may be said again")
            await messenger.close()
        finally:
            await asyncio.gather(one.close(), two.close())

    asyncio.run(scenario())


def test_who_asks_is_told_of_what_was_taken_and_not_of_what_was_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        one = await Host.start(tmp_path / "one.key", LOOPBACK)
        two = await Host.start(tmp_path / "two.key", LOOPBACK)
        taken, heard = list[int](), list[int]()

        async def hear(sender: str, body: bytes) -> bytes:
            _, message, _ = unpack(body)
            assert isinstance(message, Hello)
            heard.append(message.protocol_version)
            if message.protocol_version == 2:
                raise PeerFault("it has no place for it", sender)
            return b""

        try:
            await ControlPlane(two, hear).ready()
            messenger = Messenger(one, await ControlPlane(one, hear).ready(), life=1)
            messenger.learn(two.peer_id, await two.addresses())
            for number in (1, 2, 3):
                messenger.tell(two.peer_id, Hello(number, ()), partial(taken.append, number))
            await until(lambda: sorted(heard) == [1, 2, 3], "all have come")
            await until(lambda: not messenger._unanswered[two.peer_id], "all are answered")
            assert sorted(taken) == [1, 3] and not messenger._when_taken
            await messenger.close()
        finally:
            await asyncio.gather(one.close(), two.close())

    asyncio.run(scenario())


@pytest.mark.parametrize("is_known", [True, False])
def test_nobody_waits_for_the_answer_to_an_earlier_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """The same holds for a peer that came by itself and whose address is not known. A peer far away
    got one message for each round trip, and could not follow quick steps."""
    monkeypatch.setattr(messenger_module, "UNDER_WAY_LIMIT", 3)

    async def scenario() -> None:
        one = await Host.start(tmp_path / "one.key", LOOPBACK)
        two = await Host.start(tmp_path / "two.key", LOOPBACK)
        waiting: list[int] = []
        answer = asyncio.Event()

        async def hear(sender: str, body: bytes) -> bytes:
            _, message, _ = unpack(body)
            assert isinstance(message, Hello)
            if message.protocol_version:
                waiting.append(message.protocol_version)
                await answer.wait()
            return b""

        try:
            await ControlPlane(two, hear).ready()
            messenger = Messenger(one, await ControlPlane(one, hear).ready(), life=1)
            if is_known:
                messenger.learn(two.peer_id, await two.addresses())
            else:
                await two.connect(one.peer_id, await one.addresses(), 5.0)
            messenger.tell(two.peer_id, Hello(0, ()))
            for number in range(1, 6):
                messenger.tell(two.peer_id, Hello(number, ()))
            await until(lambda: len(waiting) == 3, "three are under way")
            await messenger.ask(two.peer_id, Hello(0, ()))  # and no more than three
            assert sorted(waiting) == [1, 2, 3]
            answer.set()
            await until(lambda: len(waiting) == 5, "the rest follows")
            await messenger.close()
        finally:
            await asyncio.gather(one.close(), two.close())

    asyncio.run(scenario())


def test_it_remembers_a_bounded_number_of_peers_and_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messenger_module, "PEERS_LIMIT", 3)

    async def scenario() -> None:
        host = await Host.start(tmp_path / "one.key", LOOPBACK)
        try:
            messenger = Messenger(host, ControlPlane(host, lambda *_: None), life=1)  # type: ignore[arg-type]
            for number in range(10):
                messenger.learn(f"peer-{number}", ("/ip4/127.0.0.1/tcp/1",) * 1000)
                messenger.heard(f"peer-{number}")
            assert messenger.known == ("peer-7", "peer-8", "peer-9")
            assert set(messenger.heard_s) == set(messenger.known)
            assert all(len(where) <= 16 for where in messenger._addresses.values())
            messenger.learn(host.peer_id, ("/ip4/127.0.0.1/tcp/1",))
            assert host.peer_id not in messenger.known
        finally:
            await host.close()

    asyncio.run(scenario())


def test_no_word_of_others_that_is_no_address_gets_further(tmp_path: Path) -> None:
    bad = ("/ip4/203.0.113.7/tcp/0000019999999", "/dns4/a b/tcp/80", "x", "/ip6/::1%lo/tcp/1")
    good = "/ip4/127.0.0.1/tcp/1"

    async def scenario() -> None:
        host = await Host.start(tmp_path / "one.key", LOOPBACK)
        peer_id = Identity.load_or_create(tmp_path / "other.key").peer_id
        try:
            messenger = Messenger(host, ControlPlane(host, lambda *_: None), life=1)  # type: ignore[arg-type]
            messenger.hear_of(peer_id, bad)
            assert host.where(peer_id) == ()
            messenger.hear_of(peer_id, (*bad, good))
            assert host.where(peer_id) == (good,)
            messenger.learn(peer_id, bad)
            assert not messenger.known and host.calling.vouched == {peer_id: None}
            messenger.learn(peer_id, (*bad, f"{good}/p2p/{peer_id}", good))
            assert messenger.where(peer_id) == (f"{good}/p2p/{peer_id}",) * 2
            messenger.learn(peer_id, bad)
            assert messenger.where(peer_id), "and what it was known by stays"
            with pytest.raises(Unreachable):
                await messenger.look_up(peer_id, bad, was_there=True)
        finally:
            await host.close()

    asyncio.run(scenario())


def test_what_is_told_to_many_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Message] = []

    def pack(life: int, message: Message) -> bytes:
        packed.append(message)
        return wire.pack(life, message)

    monkeypatch.setattr(messenger_module, "pack", pack)
    calls: list[tuple[str, bytes]] = []

    class Control:
        async def call(self, peer_id: str, body: bytes, deadline_s: float) -> bytes:
            calls.append((peer_id, body))
            return b""

    class NoHost:
        peer_id = "me"

    async def scenario() -> None:
        messenger = Messenger(cast(HostPort, NoHost()), cast(ControlPlane, Control()), life=3)
        one, another = Hello(1, ()), Hello(1, ())
        for peer_id in ("a", "b", "c"):
            await messenger.ask(peer_id, one)
        await messenger.ask("a", another)
        assert [message is one for message in packed] == [True, False], "by identity"
        assert len(calls) == 4 and {body for _, body in calls} == {wire.pack(3, one)}
        for number in range(2 * messenger_module.PACKED_LIMIT):
            await messenger.ask("a", Hello(number, ()))
        assert len(messenger._last_packed) == messenger_module.PACKED_LIMIT

    asyncio.run(scenario())
