"""The values of the directory, presences and run specs, and the keys under which they stand."""

import hashlib

import msgspec

from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Sign, Signed, open_signed, sign
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.net.errors import one_line
from p2p_dtfm.net.hivemind_parts import DHTID

PRESENCE_KIND = "presence"
RUN_KIND = "run"
VALUE_LIMIT_BYTES = 4096
HEXADECIMAL = set("0123456789abcdef")
SHARDS = 4
ADDRESSES_LIMIT = 16
ADDRESS_LIMIT_CHARACTERS = 200


class Presence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer's claim to take part in a run, and where it is reached. Addresses are full
    multiaddrs."""

    peer_id: str
    life: int
    addresses: tuple[str, ...]
    run_digest: str
    expires_ms: int = 0
    """Unix time. The signature covers it, so nobody but the peer can keep it alive."""


def sign_presence(presence: Presence, signer: Sign) -> Signed:
    """The presence as its peer publishes it."""
    return sign(presence.peer_id, PRESENCE_KIND, encode(presence), signer)


def open_presence(signed: Signed) -> Presence:
    """Check signature, owner and limits. Raises `PeerFault`."""
    presence = open_signed(signed, PRESENCE_KIND, Presence, verify)
    if presence.peer_id != signed.peer_id:
        raise PeerFault(f"signed a presence of {one_line(presence.peer_id, 60)}", signed.peer_id)
    if not 0 <= presence.life < 1 << 60 or not 0 <= presence.expires_ms < 1 << 60:
        raise PeerFault("a presence with a number below 0 or above 2^60", signed.peer_id)
    if len(presence.addresses) > ADDRESSES_LIMIT:
        raise PeerFault(f"a presence with {len(presence.addresses)} addresses", signed.peer_id)
    if any(len(address) > ADDRESS_LIMIT_CHARACTERS for address in presence.addresses):
        raise PeerFault("a presence with an overlong address", signed.peer_id)
    return presence


def sign_run(run_spec_bytes: bytes, peer_id: str, signer: Sign) -> Signed:
    """A run spec (`RunSpec.canonical_bytes()`) as a peer publishes it."""
    return sign(peer_id, RUN_KIND, run_spec_bytes, signer)


def open_run(signed: Signed, run_digest: str) -> bytes:
    """The canonical bytes of the run spec named `run_digest`. Raises `PeerFault`."""
    run_spec = open_signed_bytes(signed, RUN_KIND)
    if digest_bytes(run_spec) != run_digest:
        raise PeerFault(
            f"a run spec with digest {digest_bytes(run_spec)[:12]} under the name "
            f"{one_line(run_digest[:12])}",
            signed.peer_id,
        )
    return run_spec


def open_signed_bytes(signed: Signed, kind: str) -> bytes:
    """The payload of a statement of `kind` whose signature holds. Raises `PeerFault`."""
    open_signed(signed, kind, msgspec.Raw, verify)
    return signed.payload


def presence_key(run_digest: str, shard: int) -> str:
    return f"p2p-dtfm/1/presence/{run_digest}/{shard}"


def run_key(run_digest: str) -> str:
    return f"p2p-dtfm/1/run/{run_digest}"


def shard_of(peer_id: str) -> int:
    """The shard of a run's members in which a peer stands."""
    return hashlib.blake2b(peer_id.encode(), digest_size=1).digest()[0] % SHARDS


def key_bytes(key: str) -> bytes:
    """The key as the DHT knows it: a hash."""
    return bytes(DHTID.generate(source=key).to_bytes())
