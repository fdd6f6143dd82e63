"""A manifest from a stranger is believed only if every number in it can be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.train.data import Manifest, ShardEntry, parse_manifest
from p2p_dtfm.train.data.manifest import Notes, TokenizerEntry, Totals

A, B, C = "a" * 64, "b" * 64, "c" * 64
GOOD = Manifest(
    format_version=1,
    token_type="uint8",
    tokenizer=TokenizerEntry(C, 16, 256),
    shards=(ShardEntry(A, 1000, "train"), ShardEntry(B, 100, "held_out")),
    totals=Totals(1000, 100, 3, 1097),
    notes=Notes("text", "CC0-1.0", "made up"),
)


def changed(**changes: object) -> bytes:
    """GOOD's canonical JSON with some fields changed; `a__0__b` goes into lists and maps."""
    value = json.loads(GOOD.to_bytes())
    for path, new in changes.items():
        *parents, key = [int(part) if part.isdigit() else part for part in path.split("__")]
        section = value
        for parent in parents:
            section = section[parent]
        section[key] = new
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def test_canonical_bytes_come_back() -> None:
    assert changed() == GOOD.to_bytes()
    assert parse_manifest(GOOD.to_bytes(), GOOD.digest()) == GOOD
    assert GOOD.digest() == digest_bytes(GOOD.to_bytes())
    assert GOOD.blobs() == {A: 1000, B: 100, C: 16}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff",
        b"null",
        b"[" * 100_000,
        b" " * (17 << 20),
        GOOD.to_bytes() + b"\n",
        GOOD.to_bytes().replace(b":256", b":256.0"),
        GOOD.to_bytes().replace(b'"format_version":1', b'"format_version":1,"format_version":1'),
        json.dumps(json.loads(GOOD.to_bytes())).encode(),
        changed(format_version=2),
        changed(surprise=1),
        changed(token_type="float64"),
        changed(token_type="uint16"),
        changed(tokenizer__vocabulary=1 << 40),
        changed(tokenizer__vocabulary=0),
        changed(tokenizer__size_bytes=1 << 40),
        changed(tokenizer__digest=A),
        changed(tokenizer__start_of_document=256),
        changed(tokenizer__start_of_document=None),
        changed(shards=[]),
        changed(shards__0__tokens=1 << 40, totals__train_tokens=1 << 40),
        changed(shards__0__tokens=-1000),
        changed(shards__0__tokens=0),
        changed(shards__0__tokens=999),
        changed(shards__0__split="test"),
        changed(shards__0__digest="../../../etc/passwd"),
        changed(shards__0__digest="A" * 64),
        changed(shards__0__digest=A + "\n"),
        changed(shards__1__digest=A),
        changed(totals__train_tokens=10**30),
        changed(totals__text_bytes=-1),
        changed(notes__name="x" * 100_000),
    ],
)
def test_a_bad_manifest(payload: bytes) -> None:
    with pytest.raises(PeerFault):
        parse_manifest(payload)


@given(place=st.integers(0, len(GOOD.to_bytes()) - 1), byte=st.integers(0, 255))
def test_any_one_byte_changed_is_refused_or_harmless(place: int, byte: int) -> None:
    payload = bytearray(GOOD.to_bytes())
    payload[place] = byte
    try:
        manifest = parse_manifest(bytes(payload))
    except PeerFault:
        return
    assert manifest.to_bytes() == payload


def test_another_manifest_than_asked_for() -> None:
    with pytest.raises(PeerFault, match="does not hash"):
        parse_manifest(GOOD.to_bytes(), "0" * 64)
