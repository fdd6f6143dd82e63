"""Who a peer is: an Ed25519 key whose public half is the peer id.

A peer id of this kind holds its public key, so a signature can be checked from the id alone. See
libp2p's specs, peer-ids: the "identity" multihash of a serialised key of at most 42 bytes.
"""

import errno
import functools
import hashlib
import os
import tempfile
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p_dtfm.core.protocol.errors import UserError

# protobuf of libp2p's crypto.PrivateKey: field 1 key type 1 (Ed25519), field 2 of 64 bytes, which
# are the raw private key followed by the raw public key
_PRIVATE_PREFIX = bytes((0x08, 0x01, 0x12, 0x40))
# identity multihash (code 0, 36 bytes) over crypto.PublicKey: type 1, field 2 of 32 bytes
_PEER_ID_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64
_PEER_ID_TEXT_LIMIT = 64
_VERIFIED_LIMIT = 8192
_verified: dict[bytes, None] = {}
"""Digests of statements whose signatures were found good, oldest first. The same statements come
again with every gathering, from each peer that passes them on. A digest takes a fiftieth of a
verification. Two different statements cannot share the digested bytes: an id holds no zero byte,
and all signatures have one length, also those that are looked for."""

_signed: dict[bytes, None] = {}
"""The same for what this process has signed itself, with whichever key. Its own words come back
with each gathering, and daemons in virtual time all share one process. The sender is charged as for
a verification."""

EFFORT_BYTES = 4096
_effort = {"spent": 0}


class Identity:
    """This peer's key pair."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.peer_id = peer_id_of(key.public_key().public_bytes_raw())

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """The key in `path`. If there is no file, a new key is written, with mode 0600. If two
        programs come to an empty home at once, both have the key of the one that wrote first.

        Raises `UserError` when the file cannot be read or holds anything but an Ed25519 key.
        """
        try:
            stored = path.read_bytes()
        except FileNotFoundError:
            new = cls(Ed25519PrivateKey.generate()).to_bytes()
            return cls(_parse(_write_first(path, new), path))
        except OSError as error:
            raise UserError(
                f"cannot read the identity {path}: {error.strerror}",
                f"make it a file that you may read, or remove it: mv {path} {path}.old",
            ) from error
        return cls(_parse(stored, path))

    def to_bytes(self) -> bytes:
        """The private key as p2pd reads it."""
        public = self._key.public_key().public_bytes_raw()
        return _PRIVATE_PREFIX + self._key.private_bytes_raw() + public

    def sign(self, payload: bytes) -> bytes:
        """The signature, of 64 bytes."""
        signature = self._key.sign(payload)
        _note(_signed, _mark(self.peer_id, payload, signature))
        return signature


def identity_of_seed(seed: bytes) -> Identity:
    """The identity that follows from 32 bytes, for swarms in which all follows from a seed."""
    return Identity(Ed25519PrivateKey.from_private_bytes(seed))


def _parse(stored: bytes, path: Path) -> Ed25519PrivateKey:
    private = stored[len(_PRIVATE_PREFIX) :][:_KEY_BYTES]
    public = stored[len(_PRIVATE_PREFIX) + _KEY_BYTES :]
    if stored.startswith(_PRIVATE_PREFIX) and len(private) == len(public) == _KEY_BYTES:
        key = Ed25519PrivateKey.from_private_bytes(private)
        if key.public_key().public_bytes_raw() == public:
            return key
    raise UserError(
        f"the identity {path} is damaged: it does not hold an Ed25519 key",
        (
            f"restore {path} from a backup, to keep this peer's id",
            "or let a new peer id be made, to which no rights of the old one go over, such as a "
            f"founder's: mv {path} {path}.damaged",
        ),
    )


def _write_first(path: Path, content: bytes) -> bytes:
    """Write a file whole or not at all, never readable by others, and never over what another
    program has written meanwhile. Returns what is in `path` then."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:  # mkstemp made it with mode 0600
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            _name_unless_taken(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        return path.read_bytes()
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        fix = f"make {path.parent} a directory that you may write to"
        raise UserError(
            f"cannot write the identity {path}: {error.strerror}",
            "free space on that disk" if full else fix,
        ) from error


def _name_unless_taken(temporary: str, path: Path) -> None:
    """Give `temporary` the name `path` unless that is taken; `temporary` is gone afterwards. Not
    every file system can give a file a second name. On the others the last writer wins."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:
        os.replace(temporary, path)
        return
    os.unlink(temporary)


def peer_id_of(public_key: bytes) -> str:
    """Base58 peer id of a raw Ed25519 public key."""
    return base58.b58encode(_PEER_ID_PREFIX + public_key).decode()


def is_peer_id(text: str) -> bool:
    """Whether `text` is the canonical base58 id of an Ed25519 peer."""
    return _public_key(text) is not None


def _public_key(peer_id: str) -> Ed25519PublicKey | None:
    """The key in a peer id, if it is one. A text that is too long is none, and is not remembered:
    names of half a MB would take 2 GB."""
    if not isinstance(peer_id, str) or len(peer_id) > _PEER_ID_TEXT_LIMIT:
        return None
    return _key_of(peer_id)


@functools.lru_cache(maxsize=4096)
def _key_of(peer_id: str) -> Ed25519PublicKey | None:
    try:
        decoded = base58.b58decode(peer_id.encode("ascii"))
    except ValueError:
        return None
    raw = decoded[len(_PEER_ID_PREFIX) :]
    if not decoded.startswith(_PEER_ID_PREFIX) or len(raw) != _KEY_BYTES:
        return None
    if peer_id_of(raw) != peer_id:  # one text for each peer, or one peer could be two
        return None
    try:
        return Ed25519PublicKey.from_public_bytes(raw)
    except ValueError:
        return None


def verify(peer_id: str, payload: bytes, signature: bytes) -> bool:
    """Whether `peer_id` signed `payload`. Never raises, whatever a stranger put in."""
    key = _public_key(peer_id)
    if key is None or len(signature) != _SIGNATURE_BYTES:
        return False
    mark = _mark(peer_id, payload, signature)
    if mark in _verified:
        return True
    _effort["spent"] += 1 + len(payload) // EFFORT_BYTES
    if mark not in _signed:
        try:
            key.verify(signature, payload)
        except (InvalidSignature, ValueError):
            return False
    _note(_verified, mark)
    return True


def _mark(peer_id: str, payload: bytes, signature: bytes) -> bytes:
    return hashlib.blake2b(b"\x00".join((peer_id.encode(), signature, payload))).digest()


def _note(kept: dict[bytes, None], mark: bytes) -> None:
    kept[mark] = None
    if len(kept) > _VERIFIED_LIMIT:
        kept.pop(next(iter(kept)), None)


def effort_spent() -> int:
    """What checking signatures has cost this process. Each costs one unit, and one more for each
    `EFFORT_BYTES` that it covers, which are decoded next. Known good signatures cost nothing."""
    return _effort["spent"]
