"""A statement and who made it: payload bytes under the signature of a peer's libp2p identity."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault

Value = TypeVar("Value")

Sign = Callable[[bytes], bytes]
"""payload -> signature, with this peer's own key."""

Verify = Callable[[str, bytes, bytes], bool]
"""(peer id, payload, signature) -> whether that peer signed that payload."""


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """`payload` as stated by `peer_id`. `kind` keeps one sort of statement from being another."""

    peer_id: str
    kind: str
    payload: bytes
    signature: bytes


def covered(peer_id: str, kind: str, payload: bytes) -> bytes:
    """What a signature of `payload` as a statement of this kind is made over."""
    return b"p2p-dtfm/1\x00" + kind.encode() + b"\x00" + peer_id.encode() + b"\x00" + payload


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
