"""Presences of a run whose members alone may find one another.

They stand in the directory under names that only those with the run's key can make, and are
encrypted with that key. A node that keeps them for others sees who brings one, which its connection
tells it anyway, and when it expires. It sees neither the run nor where its members are.
"""

import hashlib
import hmac
import secrets

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Sign, Signed, open_signed, sign
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.net.directory.values import HEXADECIMAL, VALUE_LIMIT_BYTES

SEALED_KIND = "sealed"
NONCE_BYTES = 12
NAME_CHARACTERS = 64


class Sealed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What strangers keep, signed by the peer that brings it."""

    expires_ms: int
    slot: str
    """Where the value stands. It tells nothing without the key."""
    box: bytes


class Seal:
    """The key of one run, for what is written and read in the directory."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cipher = AESGCM(hmac.digest(key, b"p2p-dtfm directory values", hashlib.sha256))

    def slot(self, name: str) -> str:
        """The slot under which those who have the key find a name."""
        text = b"p2p-dtfm directory slot " + name.encode()
        return hmac.digest(self._key, text, hashlib.sha256).hex()

    def close(self, name: str, value: Signed, expires_ms: int, signer: Sign) -> Signed:
        """Encrypt and sign `value`, which is this very peer's, so that strangers may keep it."""
        nonce, slot = secrets.token_bytes(NONCE_BYTES), self.slot(name)
        box = nonce + self._cipher.encrypt(nonce, encode(value), slot.encode())
        return sign(value.peer_id, SEALED_KIND, encode(Sealed(expires_ms, slot, box)), signer)

    def open(self, name: str, value: bytes) -> Signed:
        """Decrypt what its bringer closed under `name`. A stranger without the key can copy a box,
        and claim a longer life for it. Raises `PeerFault`."""
        brought = decode(value, Signed, VALUE_LIMIT_BYTES)
        sealed = open_sealed(brought)
        nonce, rest = sealed.box[:NONCE_BYTES], sealed.box[NONCE_BYTES:]
        try:
            inner = self._cipher.decrypt(nonce, rest, self.slot(name).encode())
        except (InvalidTag, ValueError) as error:
            raise PeerFault("sealed with another key") from error
        closed = decode(inner, Signed, VALUE_LIMIT_BYTES)
        if closed.peer_id != brought.peer_id:
            raise PeerFault("brings what another peer has sealed", brought.peer_id)
        return closed


def sealed_key(slot: str) -> str:
    return f"p2p-dtfm/1/sealed/{slot}"


def open_sealed(signed: Signed) -> Sealed:
    """Check the signature of the peer that brought it, not what is within. Raises `PeerFault`."""
    sealed = open_signed(signed, SEALED_KIND, Sealed, verify)
    if len(sealed.slot) != NAME_CHARACTERS or not set(sealed.slot) <= HEXADECIMAL:
        raise PeerFault("a sealed value under a name that cannot be", signed.peer_id)
    if not 0 <= sealed.expires_ms < 1 << 60:
        raise PeerFault("a sealed value that expires in no time", signed.peer_id)
    return sealed
