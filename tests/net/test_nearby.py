"""Questions on the local network, over multicast on loopback."""

import asyncio
import ipaddress
import secrets
import socket
import time
from typing import Any

import pytest

from p2p_dtfm.net import event_loop
from p2p_dtfm.net.contacts import nearby
from p2p_dtfm.net.contacts.nearby import (
    ANSWERS_PER_S,
    GROUP,
    PORT,
    QUESTION_BYTES,
    Nearby,
    Neighbour,
    make_answer,
    make_question,
    read_answer,
    read_question,
)
from tests.net.net_support import run

RUN = secrets.token_hex(32)
OTHER_RUN = secrets.token_hex(32)
ASKER = "12D3KooWKjKpe6EK24MqLPDpteHmy8Wc6Lt9csQ9x3RkQcxe322p"
MEMBER = "12D3KooWM4Tq2kcoqm7cK6wfTyt6ycm2EBUmoDZ5mYb9biyQ69cP"
NONCE = b"n" * 16


def test_members_of_the_run_answer_and_nobody_else() -> None:
    async def scenario() -> None:
        asker, member, stranger = (Nearby(ASKER, True), Nearby(MEMBER, True), Nearby(MEMBER, True))
        heard: list[Neighbour] = []
        await member.answer(RUN, 4001, lambda peer_id: peer_id == ASKER)
        await stranger.answer(OTHER_RUN, 4002, lambda peer_id: True)
        began_s = time.monotonic()
        await asker.ask(RUN, heard.append)
        assert time.monotonic() - began_s < 3.0
        assert heard == [Neighbour(MEMBER, "/ip4/127.0.0.1/tcp/4001", knows_asker=True)]
        member.close()
        stranger.close()
        heard.clear()
        await asker.ask(RUN, heard.append)
        assert heard == []

    run(scenario())


def test_who_only_comes_back_answers_those_that_it_has_met() -> None:
    async def scenario() -> None:
        asker, back = Nearby(ASKER, True), Nearby(MEMBER, True)
        heard: list[Neighbour] = []
        await back.answer(RUN, 4001, lambda peer_id: False, only_known=True)
        await asker.ask(RUN, heard.append)
        assert heard == []
        await back.answer(RUN, 4001, lambda peer_id: peer_id == ASKER, only_known=True)
        await asker.ask(RUN, heard.append)
        assert heard == [Neighbour(MEMBER, "/ip4/127.0.0.1/tcp/4001", knows_asker=True)]
        back.close()

    run(scenario())


def test_a_question_says_nothing_to_who_does_not_know_the_run() -> None:
    one, other = make_question(RUN, ASKER, NONCE), make_question(OTHER_RUN, ASKER, NONCE)
    assert read_question(one, RUN) == (NONCE, ASKER)
    assert read_question(one, OTHER_RUN) is None and read_question(other, RUN) is None
    again = make_question(RUN, ASKER, b"m" * 16)
    assert one[26:42] != again[26:42], "two questions about one run are not seen to be"
    assert RUN[:16].encode() not in one and bytes.fromhex(RUN)[:8] not in one


def test_an_answer_is_shorter_than_its_question_and_belongs_to_it() -> None:
    answer = make_answer(RUN, MEMBER, 4001, NONCE, knows_asker=False)
    assert len(answer) < QUESTION_BYTES
    found = read_answer(answer, RUN, NONCE, "192.0.2.7")
    assert found == Neighbour(MEMBER, "/ip4/192.0.2.7/tcp/4001", knows_asker=False)
    assert read_answer(answer, RUN, b"m" * 16, "192.0.2.7") is None
    assert read_answer(answer, OTHER_RUN, NONCE, "192.0.2.7") is None
    without_run = make_answer(OTHER_RUN, MEMBER, 4001, NONCE, knows_asker=True)
    assert read_answer(without_run, RUN, NONCE, "192.0.2.7") is None
    nobody = make_answer(RUN, "not a peer id", 4001, NONCE, knows_asker=True)
    assert read_answer(nobody, RUN, NONCE, "192.0.2.7") is None


def test_any_bytes_are_read_without_harm() -> None:
    for size in (0, 1, 10, 41, 42, 58, 59, 61, QUESTION_BYTES - 1, QUESTION_BYTES, 500):
        for start in (b"", b"p2p-dtfm?\x01", b"p2p-dtfm!\x01"):
            datagram = (start + secrets.token_bytes(size))[:size]
            assert read_question(datagram, RUN) is None
            assert read_answer(datagram, RUN, NONCE, "127.0.0.1") is None


def test_a_flood_of_questions_gets_few_answers() -> None:
    async def scenario() -> None:
        member = Nearby(MEMBER, True)
        await member.answer(RUN, 4001, lambda peer_id: False)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flood:
            flood.bind(("127.0.0.1", 0))
            flood.setsockopt(
                socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1")
            )
            flood.settimeout(0.3)
            for _ in range(10 * ANSWERS_PER_S):
                flood.sendto(make_question(RUN, ASKER, NONCE), (GROUP, PORT))
            await asyncio.sleep(0.5)
            count = 0
            try:
                while flood.recv(1024):
                    count += 1
            except TimeoutError:
                pass
        member.close()
        assert 0 < count <= ANSWERS_PER_S

    run(scenario())


def test_a_machine_that_is_carried_elsewhere_asks_and_answers_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the peer was started again, nobody on its new network was found, or found it."""
    home, away = map(ipaddress.IPv4Interface, ("192.168.1.7/24", "10.20.0.9/16"))
    monkeypatch.setattr(nearby, "LISTEN_S", 0.0)
    monkeypatch.setattr(nearby, "ASK_AT_S", (0.0,))
    heard: list[Any] = []
    monkeypatch.setattr(nearby, "_hear", lambda listener, found: heard.append(list(found)))
    monkeypatch.setattr(nearby, "_interfaces", lambda only_loopback: [home])

    async def scenario() -> None:
        here = Nearby(MEMBER, only_loopback=False)
        await here.answer("aa" * 32, 4001, lambda peer: False)
        monkeypatch.setattr(nearby, "_interfaces", lambda only_loopback: [away])
        await here.ask("aa" * 32, lambda found: None)
        assert here._is_near("10.20.3.4") and not here._is_near("192.168.1.8")
        assert heard == [[home], [away]]

        def fails(only_loopback: bool) -> list[Any]:
            raise ValueError("a netmask that is none")

        monkeypatch.setattr(nearby, "_interfaces", fails)
        await here.ask("aa" * 32, lambda found: None)
        assert here._is_near("10.20.3.4")
        here.close()

    event_loop.run(scenario())


def test_networks_that_cannot_be_read_end_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer looks at the networks again before each question."""
    home = ipaddress.IPv4Interface("192.168.1.7/24")

    def fails(only_loopback: bool) -> list[Any]:
        raise OSError("netlink")

    monkeypatch.setattr(nearby, "_interfaces", fails)
    here = Nearby(MEMBER, only_loopback=False)
    assert not here._is_near("192.168.1.8")
    monkeypatch.setattr(nearby, "_interfaces", lambda only_loopback: [home])
    here.look_around()
    assert here._is_near("192.168.1.8")


def test_who_asks_on_the_new_network_is_answered_by_one_that_has_asked_nobody_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A member looked at its own networks only as it asked, which a member that misses nobody never
    does. To such a member every question seemed to come from afar."""
    home, away = map(ipaddress.IPv4Interface, ("192.168.1.7/24", "127.0.0.1/8"))
    looks: list[float] = []
    monkeypatch.setattr(nearby, "_interfaces", lambda only_loopback: [home])

    def moved(only_loopback: bool) -> list[Any]:
        looks.append(time.monotonic())
        return [away]

    async def scenario() -> None:
        heard: list[Neighbour] = []
        here, asker = Nearby(MEMBER, only_loopback=False), Nearby(ASKER, only_loopback=True)
        await here.answer(RUN, 4001, lambda peer: True)
        assert here._listener is not None
        nearby._hear(here._listener, [away])  # as on a card that only got another address
        monkeypatch.setattr(nearby, "_interfaces", moved)
        monkeypatch.setattr(nearby, "LOOK_AGAIN_S", 3600.0)  # a busy machine may take any time
        await asker.ask(RUN, heard.append)
        assert heard == [], "it has looked a moment ago"
        monkeypatch.setattr(nearby, "LOOK_AGAIN_S", 0.1)
        looks.clear()
        await asker.ask(RUN, heard.append)
        assert [found.peer_id for found in heard] == [MEMBER]
        assert len(looks) == 2, "the asker, and who answers once"
        here.close()

    run(scenario())
