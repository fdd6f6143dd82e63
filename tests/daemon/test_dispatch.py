"""What arrives is handed on, whatever else is wrong with it."""

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
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member
from p2p_dtfm.daemon.node import dispatch
from p2p_dtfm.daemon.node.dispatch import WAITING_TOLD_LIMIT, Dispatch
from p2p_dtfm.net.contacts.calling import Calling
from tests.core.builders import record
from tests.core.liars import contribution, evil_record


class Receiver(Dispatch):
    """With an agreement that has begun something as soon as it heard the sender."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self._agreement = SimpleNamespace(
            receive=self.receive, opened_record=self.opened_record, gathered=(0, ())
        )
        self.asked_for: set[Signed] = set()
        self._learnt: dict[str, Signed] = {}
        self._gathered = (0, 0)
        self.looks_again: list[bool] = []
        trainer = SimpleNamespace(may_commit=lambda: self.looks_again.append(True))
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
    """It may be all that the step under way has waited for."""
    receiver = Receiver()
    receiver._receive("a", Active(Member("a", 1), GENESIS, 4))
    assert receiver.looks_again


def test_what_the_agreement_did_not_open_is_not_learnt() -> None:
    """Whoever passes on invented peers makes a daemon neither look at them nor call them."""
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


def test_the_newcomers_that_a_newcomer_hears_of_are_looked_up_at_once() -> None:
    """Of 32 keys that had asked and gone, one that asked twice a second had this peer ask libp2p
    for all its connections 64 times a second."""
    looks: list[None] = []

    async def ends() -> dict[str, tuple[str, ...]]:
        looks.append(None)
        return {"peer 3": ("/ip4/5.9.0.3/tcp/4001",)}

    async def addresses() -> tuple[str, ...]:
        return ()

    receiver: Any = Receiver()
    joiners = [record(f"peer {number}") for number in range(40)]
    receiver._agreement = SimpleNamespace(
        view=None, joiners=tuple(joiners), proof_of_end=None, step=0, bars=()
    )
    receiver._membership = SimpleNamespace(lets_in=lambda: True)
    receiver._me = "me"
    receiver._host = SimpleNamespace(calling=Calling(ends), addresses=addresses)
    known = asyncio.run(receiver._known_peers("peer 1"))
    assert len(known.waiting) == WAITING_TOLD_LIMIT and len(looks) == 1
    assert [it.peer_id for it in known.waiting if it.seen_host == "5.9.0.3"] == ["peer 3"]
