"""A statement and who made it: payload bytes under the signature of a peer's libp2p identity."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault

Value = TypeVar("Value")

Sign = Callable[[bytes], bytes]
"""payload -> signature, with this peer's own key."""

Verify = Callable[[str, bytes, bytes], bool]
"""(peer id, payload, signature) -> whether that peer signed that payload."""


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`payload` as stated by `peer_id`. `kind` keeps the sorts of statements apart."""

    peer_id: str
    kind: str
    payload: bytes
    signature: bytes


def covered(peer_id: str, kind: str, payload: bytes) -> bytes:
    """The bytes that the signature of a statement of this kind is made over."""
    return b"p2p-dtfm/1\x00" + kind.encode() + b"\x00" + peer_id.encode() + b"\x00" + payload


def signing_in(run_digest: str, signer: Sign) -> Sign:
    """A signer for all that is said within one run. A home has one key in all of its runs; what it
    signs in one of them counts in no other."""
    return lambda payload: signer(_in_run(run_digest, payload))


def verifying_in(run_digest: str, verify: Verify) -> Verify:
    """A check of whether a peer has signed a payload in this run."""
    return lambda peer_id, payload, signature: verify(
        peer_id, _in_run(run_digest, payload), signature
    )


def _in_run(run_digest: str, payload: bytes) -> bytes:
    """The payload behind the run's name. The name is hashed to a fixed length: otherwise a longer
    name could equal a shorter one followed by the beginning of a payload."""
    name = bytes.fromhex(digest_bytes(run_digest.encode()))
    return b"p2p-dtfm/1 in a run\x00" + name + payload


def sign(peer_id: str, kind: str, payload: bytes, signer: Sign) -> Signed:
    """State `payload` as `peer_id`."""
    return Signed(peer_id, kind, payload, signer(covered(peer_id, kind, payload)))


def open_signed(signed: Signed, kind: str, expected: type[Value], verify: Verify) -> Value:
    """Check kind and signature, then decode. Raises `PeerFault`."""
    if signed.kind != kind:
        raise PeerFault(f"a {signed.kind!r} statement where {kind!r} was due", signed.peer_id)
    text = covered(signed.peer_id, signed.kind, signed.payload)
    if not verify(signed.peer_id, text, signed.signature):
        raise PeerFault(f"forged signature on a {kind!r} statement", signed.peer_id)
    try:
        return decode(signed.payload, expected)
    except PeerFault as fault:
        raise PeerFault(fault.cause, signed.peer_id) from fault
