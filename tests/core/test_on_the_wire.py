"""How many bytes many peers' words take on the way, and what a stranger cannot make of that."""

import os
import zlib

import pytest

from p2p_dtfm.core.messages.agreement_messages import Heartbeat, Spread
from p2p_dtfm.core.messages.on_the_wire import (
    EXPANSION_LIMIT,
    SHORT_BYTES,
    compressed,
    expanded,
)
from p2p_dtfm.core.protocol.canonical import encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.peers import wire

SENDER = Member("12D3KooWSenderOfThisMessage" + "x" * 25, 1)


def spread(count: int) -> Spread:
    """Words of so many peers, with signatures that cannot be compressed."""
    contributions = tuple(
        Signed(f"12D3KooW{number:044d}", "outline", b"%d says of itself" % number, os.urandom(64))
        for number in range(count)
    )
    return Spread(SENDER, 1, True, ViewId(0, ""), 1, "", contributions)


@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_message_comes_as_it_was_said(count: int) -> None:
    said = spread(count)
    body = wire.pack(7, said)
    life, heard, size_bytes = wire.unpack(body)
    assert (life, heard) == (7, said)
    assert size_bytes >= len(body)


def test_many_peers_words_take_less() -> None:
    payload = encode_for_wire(spread(40))
    body = compressed(spread(40), payload)
    assert len(body) < 0.8 * len(payload)
    assert len(payload) <= EXPANSION_LIMIT * len(body)


def test_what_is_said_in_each_step_goes_as_it_is() -> None:
    payload = bytes(4 * SHORT_BYTES)
    heartbeat = Heartbeat(SENDER, 1)
    assert compressed(heartbeat, payload) is payload
    assert compressed(spread(0), payload[: SHORT_BYTES - 1]) == payload[: SHORT_BYTES - 1]


def test_what_would_look_like_a_bomb_goes_as_it_is() -> None:
    payload = bytes(1 << 16)
    assert compressed(spread(0), payload) is payload


BOMB = zlib.compress(bytes(1 << 20))
HONEST = zlib.compress(os.urandom(600) + b"x" * 600)


@pytest.mark.parametrize(
    "body",
    [
        BOMB,
        HONEST[:-3],
        HONEST + b"x",
        HONEST[:40] + bytes([HONEST[40] ^ 0xFF]) + HONEST[41:],
        b"\x78",
        b"\x78\x9c",
    ],
    ids=["bomb", "cut off", "followed by something", "damaged", "one byte", "two bytes"],
)
def test_a_stream_that_is_not_one_is_the_senders_fault(body: bytes) -> None:
    with pytest.raises(PeerFault, match="compressed message"):
        expanded(body)


def test_a_gate_is_told_what_was_read() -> None:
    """The gate is not told what came: a limit in bytes is on what is opened."""
    said = spread(40)
    payload_bytes = len(expanded(wire.pack(0, said)))
    assert wire.unpack(wire.pack(0, said))[2] == payload_bytes > len(wire.pack(0, said))
