"""A record counts only with its own peer's signature, for this run and protocol, within bounds."""

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import (
    RECORD_LIMIT_BYTES,
    Link,
    open_record,
    packed,
    sign_record,
)
from p2p_dtfm.core.protocol.signed import Signed, open_signed, sign, signing_in, verifying_in
from p2p_dtfm.net.contacts.identity import Identity, verify
from tests.core.builders import device, record, run_spec

RUN = run_spec().digest()
alice = Identity(Ed25519PrivateKey.generate())
mallory = Identity(Ed25519PrivateKey.generate())


def fault_of(signed: Signed, run_digest: str = RUN) -> PeerFault:
    with pytest.raises(PeerFault) as caught:
        open_record(signed, run_digest, verify)
    return caught.value


def test_a_sound_record_is_opened_as_it_was_signed() -> None:
    made = record(alice.peer_id, links={mallory.peer_id: Link(5, 6)})
    assert open_record(sign_record(made, alice.sign), RUN, verify) == made


def test_a_forged_signature_is_named_with_the_peer_it_claims() -> None:
    forged = sign_record(record(alice.peer_id), mallory.sign)
    fault = fault_of(forged)
    assert "forged signature" in fault.cause
    assert fault.peer_id == alice.peer_id


@pytest.mark.parametrize("length", [0, 1, 63, 65, 4096])
def test_a_signature_of_any_length_is_a_fault_and_no_crash(length: int) -> None:
    signed = sign_record(record(alice.peer_id), alice.sign)
    fault_of(msgspec.structs.replace(signed, signature=b"\x00" * length))


def test_changed_bytes_are_forged() -> None:
    signed = sign_record(record(alice.peer_id), alice.sign)
    changed = encode(record(alice.peer_id, sequence=2))
    assert "forged" in fault_of(msgspec.structs.replace(signed, payload=changed)).cause


def test_a_peer_cannot_speak_of_another() -> None:
    """The signature says whose record it is; nothing in the record does."""
    payload = encode(packed(record(alice.peer_id)))
    as_herself = sign(mallory.peer_id, "record", payload, mallory.sign)
    opened = open_record(as_herself, RUN, verify)
    assert opened.peer_id == mallory.peer_id
    as_alice = msgspec.structs.replace(as_herself, peer_id=alice.peer_id)
    assert "forged" in fault_of(as_alice).cause


def test_a_statement_of_another_kind_is_no_record() -> None:
    other = sign(alice.peer_id, "contribution", encode(record(alice.peer_id)), alice.sign)
    assert "'record' was due" in fault_of(other).cause
    relabelled = msgspec.structs.replace(other, kind="record")
    assert "forged" in fault_of(relabelled).cause


def test_kind_and_peer_are_covered_by_the_signature_without_ambiguity() -> None:
    signed = sign("ab", "c", b"d", lambda payload: payload)
    assert signed.signature != sign("b", "ca", b"d", lambda payload: payload).signature
    assert signed.signature != sign("ab\x00d", "c", b"", lambda payload: payload).signature


def test_what_is_signed_in_one_run_is_not_said_in_another_nor_outside_of_any() -> None:
    said = sign("ab", "c", b"d", signing_in(RUN, lambda payload: payload)).signature
    for other in ("", RUN[:-1], RUN + "c", "f" * 64):
        assert said != sign("ab", "c", b"d", signing_in(other, lambda payload: payload)).signature
    assert said != sign("ab", "c", b"d", lambda payload: payload).signature
    mine = sign_record(record(alice.peer_id), signing_in(RUN, alice.sign))
    assert open_record(mine, RUN, verifying_in(RUN, verify)).peer_id == alice.peer_id
    for looks in (verify, verifying_in("f" * 64, verify)):
        with pytest.raises(PeerFault, match="forged signature"):
            open_record(mine, RUN, looks)
    elsewhere = sign_record(
        record(alice.peer_id, run_digest="f" * 64), signing_in("f" * 64, alice.sign)
    )
    with pytest.raises(PeerFault, match="takes part in run ffffffffffff"):
        open_record(elsewhere, RUN, verifying_in(RUN, verify))


def test_a_record_of_another_run_names_both() -> None:
    fault = fault_of(sign_record(record(alice.peer_id, run_digest="f" * 64), alice.sign))
    assert "f" * 12 in fault.cause and RUN[:12] in fault.cause


def test_a_record_of_another_protocol_says_who_must_update() -> None:
    fault = fault_of(sign_record(record(alice.peer_id, protocol_version=999), alice.sign))
    assert "999" in fault.cause and "update" in fault.cause


@pytest.mark.parametrize(
    "changes",
    [
        {"life": -1},
        {"sequence": -1},
        {"sequence": 1 << 60},
        {"uplink_bytes_per_s": -1},
        {"downlink_bytes_per_s": 1 << 62},
        {"device": device(memory_bytes=-1)},
        {"device": device(memory_bytes=1 << 60)},
        {"links": {"x": Link(-1, 1)}},
        {"links": {"x": Link(1, 1 << 60)}},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(changes: dict) -> None:
    values = {"sequence": 1, "life": 1, "links": None} | changes
    signed = sign_record(record(alice.peer_id, **values), alice.sign)
    assert "number below 0 or above" in fault_of(signed).cause


def test_negative_timings_are_refused() -> None:
    timing = msgspec.structs.replace(device().block, backward_ns=-5)
    wrong = msgspec.structs.replace(device(), block=timing)
    fault_of(sign_record(record(alice.peer_id, device=wrong), alice.sign))


def test_an_oversize_record_is_refused_before_its_signature_is_checked() -> None:
    huge = record(alice.peer_id, addresses=("x" * RECORD_LIMIT_BYTES,))
    signed = sign_record(huge, alice.sign)
    checked = []

    def count(*arguments: object) -> bool:
        checked.append(arguments)
        return True

    with pytest.raises(PeerFault, match="record of"):
        open_record(signed, RUN, count)
    assert not checked


def test_a_sound_signature_over_rubbish_names_the_signer() -> None:
    signed = sign(mallory.peer_id, "record", b"\xc1rubbish", mallory.sign)
    fault = fault_of(signed)
    assert "not a valid PackedRecord" in fault.cause
    assert fault.peer_id == mallory.peer_id


def test_floats_and_unknown_fields_are_no_record() -> None:
    told = packed(record(alice.peer_id))
    plain = list(msgspec.structs.astuple(told))
    life, intent = (told.__struct_fields__.index(name) for name in ("life", "intent"))
    for changed in (
        [*plain[:life], 1.0, *plain[life + 1 :]],
        [*plain, "red"],
        [*plain[:intent], 9, *plain[intent + 1 :]],
        plain[:-1],
    ):
        signed = sign(alice.peer_id, "record", encode(changed), alice.sign)
        assert "not a valid PackedRecord" in fault_of(signed).cause


@pytest.mark.parametrize("peer_id", ["", "nobody", "1" * 52, "é" * 40, "Q" * 5000])
def test_a_peer_id_that_is_none_has_signed_nothing(peer_id: str) -> None:
    signed = Signed(peer_id, "record", encode(record(peer_id)), b"\x00" * 64)
    with pytest.raises(PeerFault, match="forged"):
        open_signed(signed, "record", dict, verify)
