"""Frames: what goes in comes out; anything else is a fault before memory is taken for it."""

import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.streams.frames import (
    FrameHeader,
    FrameKind,
    FrameLimits,
    FrameReader,
    encode_frame,
)

LIMITS = FrameLimits(payload_bytes=1 << 16)


def _header(**changes: object) -> FrameHeader:
    header = FrameHeader(3, "ab" * 32, 7, FrameKind.ACTIVATION, 1, 2, "fp32", "float32", (2, 3))
    return msgspec.structs.replace(header, **changes)


def _raw(header: FrameHeader) -> bytes:
    body = encode(header)
    return b"DTFM\x01\x00" + len(body).to_bytes(2, "big") + body


@given(
    counts=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 700), min_size=1, max_size=8),
)
def test_any_cut_of_the_stream_gives_the_same_frames(counts: list[int], cuts: list[int]) -> None:
    payloads = [bytes(range(256)) * 5 for _ in counts]
    payloads = [payload[: 4 * count] for payload, count in zip(payloads, counts, strict=True)]
    stream = b""
    for payload in payloads:
        _, start = encode_frame(_header(shape=(len(payload) // 4,)), payload)
        stream += start + payload
    reader, frames, position = FrameReader(LIMITS), [], 0
    for cut in cuts * (len(stream) // sum(cuts) + 1):
        frames += reader.feed(stream[position : position + cut])
        position += cut
    assert [bytes(payload) for _, payload in frames] == payloads
    assert not reader.inside_frame


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"payload_bytes": 1 << 40, "shape": (1 << 38,)}, "more than the limit"),
        ({"payload_bytes": 24, "shape": (1 << 40, 3)}, "dimension"),
        ({"payload_bytes": 24, "shape": ((1 << 40) - 1,) * 8}, "are due"),
        ({"payload_bytes": 24, "shape": (-2, -3)}, "dimension"),
        ({"payload_bytes": 24, "shape": (1,) * 9}, "dimensions"),
        ({"payload_bytes": 20}, "24 are due"),
        ({"payload_bytes": 24, "codec": "zip"}, "unknown codec"),
        ({"payload_bytes": 24, "dtype": "object"}, "unknown type"),
        ({"payload_bytes": -1}, "payload_bytes"),
        ({"payload_bytes": 24, "step": -1}, "step"),
        ({"payload_bytes": 24, "layer": -2}, "layer"),
        ({"payload_bytes": 1 << 16, "shape": (6,), "codec": "int8"}, None),
        ({"payload_bytes": 65549, "shape": (6,), "codec": "int8"}, "limit"),
    ],
)
def test_false_claims_are_found_before_the_payload(
    changes: dict[str, object], cause: str | None
) -> None:
    reader = FrameReader(LIMITS)
    if cause is None:
        assert reader.feed(_raw(_header(**changes))) == []
        return
    with pytest.raises(PeerFault, match=cause):
        reader.feed(_raw(_header(**changes)))


def test_wrong_bytes_in_the_payload_are_found() -> None:
    _, start = encode_frame(_header(), bytes(24))
    with pytest.raises(PeerFault, match="checksum"):
        FrameReader(LIMITS).feed(start + bytes(23) + b"\x01")


def test_a_claim_of_much_memory_takes_none() -> None:
    generous = FrameLimits(payload_bytes=64 << 20)
    raw = _raw(_header(payload_bytes=1 << 40, shape=(1 << 38,)))
    tracemalloc.start()
    try:
        with pytest.raises(PeerFault):
            FrameReader(generous).feed(raw)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _feed_all(reader: FrameReader, chunks: list[bytes]) -> None:
    for chunk in chunks:
        try:
            for header, payload in reader.feed(chunk):
                assert len(payload) == header.payload_bytes <= LIMITS.payload_bytes
        except PeerFault:
            return
        assert len(reader._start) <= 8 + 4096 and len(reader._payload) <= LIMITS.payload_bytes


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=200), max_size=10))
def test_any_bytes_are_frames_a_fault_or_too_few(chunks: list[bytes]) -> None:
    _feed_all(FrameReader(LIMITS), chunks)


_FIELD = st.one_of(
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from(["fp32", "float32", "activation", "int8", ""]),
    st.lists(st.integers(-5, 1 << 41), max_size=9),
    st.none(),
    st.floats(),
    st.binary(max_size=8),
)


@settings(max_examples=300)
@given(fields=st.lists(_FIELD, max_size=13), tail=st.binary(max_size=100))
def test_any_header_is_taken_or_a_fault(fields: list[object], tail: bytes) -> None:
    body = msgspec.msgpack.encode(fields)
    _feed_all(FrameReader(LIMITS), [b"DTFM\x01\x00" + len(body).to_bytes(2, "big") + body, tail])


@settings(max_examples=300)
@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_one_changed_byte_is_harmless(position: int, value: int) -> None:
    _, start = encode_frame(_header(), bytes(range(24)))
    stream = bytearray(start + bytes(range(24)))
    stream[position % len(stream)] = value
    _feed_all(FrameReader(LIMITS), [bytes(stream)])
