"""The relay's messages: what libp2p writes, and whatever strangers send."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.nat.circuit_messages import (
    HopKind,
    RelayMessage,
    RelayStatus,
    StopKind,
    encode_hop,
    encode_stop,
    read_hop,
    read_stop,
)


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(loop=asyncio.new_event_loop())
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def hop(data: bytes) -> RelayMessage:
    return event_loop.run(read_hop(reader_of(data)))


def stop(data: bytes) -> RelayMessage:
    return event_loop.run(read_stop(reader_of(data)))


@given(
    st.sampled_from(HopKind),
    st.binary(max_size=60),
    st.sampled_from(RelayStatus),
    st.integers(0, 1 << 40),
)
def test_hop_messages_come_back(
    kind: HopKind, peer: bytes, status: RelayStatus, expires_s: int
) -> None:
    message = RelayMessage(kind, peer, status, expires_s)
    assert hop(encode_hop(message)) == message


@given(st.sampled_from(StopKind), st.binary(max_size=60), st.sampled_from(RelayStatus))
def test_stop_messages_come_back(kind: StopKind, peer: bytes, status: RelayStatus) -> None:
    message = RelayMessage(kind, peer, status)
    assert stop(encode_stop(message)) == message


def test_bytes_as_the_specification_has_them() -> None:
    """A reservation asked for and granted with limits, in the protobuf encoding by hand."""
    assert encode_hop(RelayMessage(HopKind.RESERVE)) == bytes([2, 0x08, 0])
    granted = bytes([0x08, 2, 0x1A, 2, 0x08, 77, 0x22, 2, 0x08, 120, 0x28, 100])
    message = hop(bytes([len(granted)]) + granted)
    assert message == RelayMessage(HopKind.STATUS, b"", RelayStatus.OK, 77, limited=True)


@given(st.binary(max_size=200))
def test_whatever_arrives_is_a_message_or_a_fault(data: bytes) -> None:
    for read in (hop, stop):
        try:
            read(data)
        except (PeerFault, EOFError):
            continue


def test_a_length_beyond_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(PeerFault, match="longer than 4 KiB"):
        hop(b"\xff\xff\x7f")
