"""The cost of a message before anybody has asked whether its sender may say it."""

import functools
import random
import time
import zlib
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.gate.gate import PATIENCE, Admitted, Gate, Reason
from p2p_dtfm.core.gate.gate_table import STANDING_BYTES, TABLE, Role
from p2p_dtfm.core.messages.agreement_messages import Gather, Heartbeat, Standing
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.on_the_wire import Unreadable
from p2p_dtfm.core.protocol.canonical import NUMBERED_LIMIT, decode, encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.daemon.peers import wire
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.wire import FollowLayers, Hello, Knock, pack, unpack
from p2p_dtfm.testbed.crowded_numbers import crowded_numbers
from tests.daemon.test_gate_keeper import _agreement, _view

VIEW = ViewId(2, "ab")
CHANCE = random.Random(2)


def test_chosen_numbers_do_not_hold_up_who_reads_them() -> None:
    """One such message of a stranger took 1.3 s of the event loop, and one of 467 KB took 7 s."""
    numbers = dict.fromkeys(crowded_numbers(), 0)
    body = encode_for_wire([1, FollowLayers(VIEW, 1, numbers, False)])
    began = time.process_time()
    with pytest.raises(PeerFault):
        unpack(body)
    assert time.process_time() - began < 0.3


def test_so_many_numbers_name_nothing() -> None:
    named = FollowLayers(VIEW, 1, dict.fromkeys(range(NUMBERED_LIMIT + 1), 0), False)
    with pytest.raises(PeerFault, match="length"):
        unpack(encode_for_wire([1, named]))


class _Careless(msgspec.Struct):
    found: tuple[dict[int, str], ...]


def test_whatever_is_decoded_names_few_things_by_numbers() -> None:
    with pytest.raises(AssertionError, match="Numbered"):
        decode(b"", _Careless)


def test_of_each_kind_the_first_bytes_tell_it() -> None:
    seen: list[str] = []
    for message in (Heartbeat(Member("a", 1), 1), Hello(1, ()), FollowLayers(VIEW, 1, {}, True)):
        for life in (0, 200, 1 << 60):
            unpack(pack(life, message), lambda kind, size_bytes: seen.append(kind))
    assert seen == [kind for kind in ("Heartbeat", "Hello", "FollowLayers") for _ in range(3)]
    gather = Gather(Member("a", 1), 1, True, GENESIS, 1, (), tuple(MANY), "")
    asked: list[tuple[str, int]] = []
    body = pack(1, gather)
    _, heard, size_bytes = unpack(body, lambda *what: asked.append(what))
    assert heard == gather and asked == [("Gather", len(body)), ("Gather", size_bytes)]


MANY = [Member(random.Random(number).randbytes(16).hex(), number) for number in range(200)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x92",
        b"x\x01\x00",
        zlib.compress(b"nothing" * 100, 1)[:40],
        encode_for_wire([1, {"type": "unheard of"}]),
        encode_for_wire([1, {"run_digest": "", "type": "knock"}]),
        encode_for_wire([-1, Knock("")]),
        encode_for_wire([1, Knock("")])[:-2],
        encode_for_wire({"life": 1}),
    ],
)
def test_what_is_no_message_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        unpack(body)


def _asked(keeper: GateKeeper, sender: str, body: bytes) -> str:
    """Why a message is not read; empty: it is read."""
    read: list[int] = []
    original = wire.decode
    wire.decode = lambda *given: read.append(1) or original(*given)  # type: ignore[assignment]
    try:
        unpack(body, functools.partial(keeper.require_readable, sender))
    except PeerFault as fault:
        assert not read
        return fault.cause
    finally:
        wire.decode = original
    assert read
    return ""


def _keeper(**facts: Any) -> GateKeeper:
    keeper = GateKeeper()
    keeper.attach(_agreement(**facts), False)
    return keeper


def test_what_is_not_its_senders_to_say_is_not_read() -> None:
    """A message that names 50,000 members in 270 KB took 13 ms to read. All strangers together may
    say four hundred messages a second."""
    keeper = _keeper(view=_view("me", "a"))
    gather = Gather(Member("evil", 1), 1, True, GENESIS, 1, (), tuple(MANY) * 100, "")
    large = pack(1, gather)
    assert "too large" in _asked(keeper, "evil", large)
    assert not _asked(keeper, "a", large)
    follow = pack(1, FollowLayers(VIEW, 1, {}, False))
    assert "not its place" in _asked(keeper, "evil", follow) and not _asked(keeper, "a", follow)
    members = tuple(Member(CHANCE.randbytes(16).hex(), 1) for _ in range(8000))
    certificate = Certificate(VIEW, "", members, ())
    standing = pack(1, Standing(Member("evil", 1), certificate, True, 1, "f" * 64))
    assert len(standing) < STANDING_BYTES, "as it came"
    assert "too large" in _asked(keeper, "evil", standing)
    assert keeper.refused["stranger", "Standing", "too large"] == 1


def test_who_may_say_nothing_now_is_muted_by_asking_again() -> None:
    keeper, body = _keeper(view=_view("me", "a")), pack(1, FollowLayers(VIEW, 1, {}, False))
    causes = [_asked(keeper, "evil", body) for _ in range(2 * PATIENCE)]
    assert "muted" in causes[-1]
    hello = pack(1, Hello(1, ()))
    assert "muted" in _asked(keeper, "evil", hello) and not _asked(keeper, "other", hello)


def test_a_glance_takes_nothing_from_who_is_let_in() -> None:
    gate, rate = Gate(lambda sender: Role.STRANGER), TABLE["Hello"].sender
    for _ in range(3 * rate.burst):
        assert gate.glance("one", "Hello", 0, 0) is None
    for _ in range(rate.burst):
        assert isinstance(gate.admit("one", "Hello", 0, 0), Admitted)
    refusal = gate.glance("one", "Hello", 0, 0)
    assert refusal is not None and refusal.reason is Reason.RATE
    for number in range(TABLE["Hello"].together.burst):
        gate.admit(f"key-{number}", "Hello", 0, 0)
    refusal = gate.glance("another", "Hello", 0, 0)
    assert refusal is not None and refusal.reason is Reason.TOGETHER
