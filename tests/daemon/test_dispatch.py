"""A message is handed on, whatever else is wrong with it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    AgreementMessage,
    Bodies,
    Gather,
    Spread,
)
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member
from p2p_dtfm.daemon.node import dispatch
from p2p_dtfm.daemon.node.dispatch import WAITING_TOLD_LIMIT, Dispatch
from p2p_dtfm.daemon.peers.wire import Hello, Welcome
from p2p_dtfm.net.contacts.calling import Calling
from p2p_dtfm.net.contacts.identity import identity_of_seed
from p2p_dtfm.net.libp2p.control import BODY_LIMIT_BYTES
from tests.core.builders import record
from tests.core.liars import contribution, evil_record


class Receiver(Dispatch):
    """A dispatch whose agreement begins something as soon as it hears the sender."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self._agreement = SimpleNamespace(
            receive=self.receive, opened_record=self.opened_record, gathered=(0, ())
        )
        self.asked_for: set[Signed] = set()
        self._learnt: dict[str, Signed] = {}
        self._gathered = (0, 0)
        self._told_of = (None, ())
        self.looks_again: list[bool] = []
        trainer = SimpleNamespace(wake=lambda: self.looks_again.append(True))
        self._participant = SimpleNamespace(trainer=trainer)
        self._membership = SimpleNamespace(actions=SimpleNamespace(do=self.done.extend))

    def opened_record(self, signed: Signed) -> None:
        self.asked_for.add(signed)

    def receive(self, sender: str, message: AgreementMessage, now_ns: int) -> list[Any]:
        return ["the step has to stop"]


def test_what_a_message_has_begun_is_done_though_it_carries_nonsense() -> None:
    receiver = Receiver()
    nonsense = Signed("evil", "contribution", b"\xc1", b"")
    message = Gather(Member("evil", 2), 4, True, GENESIS, 1, (nonsense,), (), "0" * 64)
    receiver._receive("evil", message)
    assert receiver.done == ["the step has to stop"]


def test_the_step_loop_learns_that_somebody_is_active() -> None:
    """The step under way may have waited for that word alone."""
    receiver = Receiver()
    receiver._receive("a", Active(Member("a", 1), GENESIS, 4))
    assert receiver.looks_again


def test_what_the_agreement_did_not_open_is_not_learnt() -> None:
    """A peer that passes on invented peers makes a daemon neither look at them nor call them."""
    receiver = Receiver()
    invented = tuple(contribution(4, None, Member(f"i{n}", 1)) for n in range(50))
    records = tuple(evil_record(Member(f"r{n}", 1)) for n in range(50))
    gather = Gather(Member("evil", 2), 4, True, GENESIS, 1, invented, (), "0" * 64)
    receiver._receive("evil", msgspec.structs.replace(gather, newcomers=records))
    spread = Spread(Member("evil", 2), 4, True, GENESIS, 1, "", bodies=Bodies(records=records))
    receiver._receive("evil", spread)
    assert receiver.asked_for == set(records) and not receiver._learnt


def test_who_speaks_another_protocol_is_named_once_and_many_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(dispatch.now, "monotonic_s", lambda: clock[0])
    unlike = dispatch.UnlikeProtocols()
    for second in range(40):
        clock[0] = float(second)
        for number in range(40):
            unlike.tell("first" if second < 20 else f"p{second}-{number}", 1)
    assert [record.message for record in caplog.records] == [
        "first speaks protocol 1",
        "p20-0 speaks protocol 1",
        "p30-0 speaks protocol 1",
    ]


def test_refused_messages_of_a_member_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of thousands in a second left a line, also of one that was a member once."""
    clock = [0.0]
    monkeypatch.setattr(dispatch.now, "monotonic_s", lambda: clock[0])
    refused = dispatch.RefusedMessages()
    with caplog.at_level("INFO"):
        for second in range(12):
            clock[0] = float(second)
            for _ in range(1000):
                refused.tell("former", "Ready", "speaks for another peer", is_near=True)
                refused.tell("stranger", "Ready", "speaks for another peer", is_near=False)
    first = "refused a Ready of former: speaks for another peer"
    told = [record.message for record in caplog.records]
    assert told == [first, f"{first} (9,999 others since the last one told)"]


def test_the_newcomers_that_a_newcomer_hears_of_are_looked_up_at_once() -> None:
    """32 keys had asked and gone. For one that asked twice a second, this peer asked libp2p for all
    its connections 64 times a second."""
    looks: list[None] = []

    async def ends() -> dict[str, tuple[str, ...]]:
        looks.append(None)
        return {"peer 3": ("/ip4/5.9.0.3/tcp/4001",)}

    async def addresses() -> tuple[str, ...]:
        return ()

    receiver: Any = Receiver()
    joiners = [record(f"peer {number}") for number in range(40)]
    receiver._agreement = SimpleNamespace(
        view=None, joiners=tuple(joiners), proof_of_end=None, step=0, step_to_come=0, bars=()
    )
    receiver._membership = SimpleNamespace(lets_in=lambda: True)
    receiver._me = "me"
    receiver._host = SimpleNamespace(calling=Calling(ends), addresses=addresses)
    known = asyncio.run(receiver._known_peers("peer 1"))
    assert len(known.waiting) == WAITING_TOLD_LIMIT and len(looks) == 1
    assert [it.peer_id for it in known.waiting if it.seen_host == "5.9.0.3"] == ["peer 3"]


def long_addresses(peer_id: str) -> tuple[str, ...]:
    """As long as a record may hold them; each can be called."""
    host = ".".join(["a" * 60] * 3)
    return tuple(f"/dns4/{n}.{host}/tcp/4001/p2p/{peer_id}"[:256] for n in range(16))


def test_newcomers_are_answered_however_long_the_addresses_of_members_are() -> None:
    """With some dozens of the longest records nobody could be told anything: the answer was larger
    than allowed. With 32 waiting, strangers got half a MB for each question."""
    ids = [identity_of_seed(number.to_bytes(32, "big")).peer_id for number in range(600)]
    liars = [record(it, addresses=long_addresses(it)) for it in ids[:300]]
    odd = [record(it, addresses=("\U0001f9a4" * 256,) * 16) for it in ids[300:400]]
    honest = [record(it) for it in ids[400:]]

    async def ends() -> dict[str, tuple[str, ...]]:
        return {}

    async def addresses() -> tuple[str, ...]:
        return ("/ip4/127.0.0.1/tcp/1",)

    receiver: Any = Receiver()
    view = SimpleNamespace(snapshot=SimpleNamespace(records=(*liars, *odd, *honest)))
    receiver._agreement = SimpleNamespace(
        view=view, joiners=tuple(liars), proof_of_end=None, step=0, step_to_come=0, bars=()
    )
    receiver._membership = SimpleNamespace(lets_in=lambda: True)
    receiver._me = "me"
    receiver._run = SimpleNamespace(signed_spec=Signed("", "", b"", b""))
    receiver._network = SimpleNamespace(messenger=SimpleNamespace(hear_of=lambda *told: None))
    receiver._participant = SimpleNamespace(
        measured_rate=lambda: 0, local=SimpleNamespace(settings=SimpleNamespace(name=""))
    )
    receiver._host = SimpleNamespace(calling=Calling(ends), addresses=addresses)
    known = asyncio.run(receiver._known_peers("new"))
    body = asyncio.run(receiver._welcome("new", Hello(PROTOCOL_VERSION, ())))
    assert max(len(encode(known)), len(body)) < BODY_LIMIT_BYTES
    assert len(encode(known.waiting)) < 64 << 10
    for peers in (known.peers, decode(body, Welcome).peers):
        told = {peer.peer_id: peer.addresses for peer in peers}
        assert all(told[it.peer_id] == it.addresses for it in honest)
        assert not any(told.get(it.peer_id) for it in odd)
