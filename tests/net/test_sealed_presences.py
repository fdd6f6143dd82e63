"""What a node keeps of a run by invitation tells it nothing, and takes the room of one peer."""

import base58
import msgspec
import pytest

from p2p_dtfm.core.gate.gate import PATIENCE, Reason
from p2p_dtfm.core.gate.gate_table import TABLE
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed, sign
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed, verify
from p2p_dtfm.net.directory import sealed
from p2p_dtfm.net.directory.held_facts import ENTRY_BYTES
from p2p_dtfm.net.directory.sealed import SEALED_KIND, Seal, open_sealed, sealed_key
from p2p_dtfm.net.directory.validator import SLOTS_LIMIT, VALUE_KIND, DirectoryValidator
from p2p_dtfm.net.directory.values import Presence, key_bytes, presence_key, sign_presence
from p2p_dtfm.net.hivemind_parts import DHTRecord, MSGPackSerializer, get_dht_time

RUN = "ab" * 32
ADDRESS = "/ip4/198.51.100.7/tcp/31330"
ME, EVE = (identity_of_seed(bytes([number]) * 32) for number in (1, 2))
SEAL, NAME = Seal(b"k" * 32), presence_key(RUN, 0)


def _presence(expires_ms: int) -> Signed:
    return sign_presence(Presence(ME.peer_id, 1, (ADDRESS,), RUN, expires_ms), ME.sign)


def test_only_who_has_the_key_reads_or_finds_a_sealed_presence() -> None:
    expires_ms = int((get_dht_time() + 90) * 1000)
    presence = _presence(expires_ms)
    closed = SEAL.close(NAME, presence, expires_ms, ME.sign)
    value = encode(closed)
    assert SEAL.open(NAME, value) == presence
    for told in (RUN, ADDRESS, "198.51.100.7"):
        assert told.encode() not in value
    other = Seal(b"x" * 32)
    assert other.slot(NAME) != SEAL.slot(NAME)
    with pytest.raises(PeerFault, match="another key"):
        other.open(NAME, value)
    key, subkey = key_bytes(sealed_key(SEAL.slot(NAME))), base58.b58decode(ME.peer_id)
    expires_s = expires_ms / 1000
    assert DirectoryValidator.refusal(key, subkey, value, expires_s) is None
    of_eve = base58.b58decode(EVE.peer_id)
    assert "another peer" in (DirectoryValidator.refusal(key, of_eve, value, expires_s) or "")
    elsewhere = key_bytes(sealed_key(other.slot(NAME)))
    assert "not its own" in (DirectoryValidator.refusal(elsewhere, subkey, value, expires_s) or "")
    assert "another time" in (DirectoryValidator.refusal(key, subkey, value, expires_s + 9) or "")


def test_a_sealed_presence_is_brought_by_its_own_peer_alone() -> None:
    """Any node that keeps such a box could bring it again under a name of its own, without the key.
    It could do so until any time it liked, in place of what the peer says since it moved."""
    expires_ms = int((get_dht_time() + 90) * 1000)
    presence = _presence(expires_ms)
    mine = SEAL.close(NAME, presence, expires_ms, ME.sign)
    box = open_sealed(mine)
    later = msgspec.structs.replace(box, expires_ms=expires_ms + 3_600_000)
    copied = sign(EVE.peer_id, SEALED_KIND, encode(later), EVE.sign)
    assert open_sealed(copied).box == box.box, "to whoever keeps it, it is as good as any"
    assert SEAL.open(NAME, encode(mine)) == presence
    with pytest.raises(PeerFault, match="another peer"):
        SEAL.open(NAME, encode(copied))


def _brought(identity: Identity, number: int, ttl_s: float = 90.0) -> DHTRecord:
    """A value for any node to keep, in a place whose meaning only its peer knows."""
    seal, expires_ms = Seal(b"k" * 32), int((get_dht_time() + ttl_s) * 1000)
    inner = sign_presence(Presence(identity.peer_id, 1, (ADDRESS,), RUN), identity.sign)
    closed = seal.close(f"n{number}", inner, expires_ms, identity.sign)
    return DHTRecord(
        key_bytes(sealed_key(seal.slot(f"n{number}"))),
        MSGPackSerializer.dumps(base58.b58decode(identity.peer_id)),
        MSGPackSerializer.dumps(encode(closed)),
        expires_ms / 1000,
    )


def _forged(record: DHTRecord) -> DHTRecord:
    value = MSGPackSerializer.loads(record.value)
    forged = value[:-1] + bytes([value[-1] ^ 1])
    return DHTRecord(
        record.key, record.subkey, MSGPackSerializer.dumps(forged), record.expiration_time
    )


def test_one_peer_has_few_sealed_values_and_each_is_counted_with_what_it_takes() -> None:
    me = identity_of_seed(b"\x01" * 32)
    validator = DirectoryValidator()
    validator.sender = me.peer_id
    records = [_brought(me, number) for number in range(3 * SLOTS_LIMIT)]
    assert sum(map(validator.validate, records)) == SLOTS_LIMIT
    assert all(map(validator.validate, records[:SLOTS_LIMIT])), "those it has it may renew"
    assert validator.stored_bytes >= SLOTS_LIMIT * ENTRY_BYTES
    other = identity_of_seed(b"\x02" * 32)
    validator.sender = other.peer_id
    assert validator.validate(_brought(other, 0)), "another one may have as many"


def test_values_are_counted_at_the_gate_and_a_forgery_costs_its_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me, keeper, looked_at = identity_of_seed(b"\x01" * 32), GateKeeper(), list[str]()

    def counts(peer_id: str, payload: bytes, signature: bytes) -> bool:
        looked_at.append(peer_id)
        return verify(peer_id, payload, signature)

    monkeypatch.setattr(sealed, "verify", counts)
    row, good = TABLE[VALUE_KIND], _brought(me, 0)
    validator = DirectoryValidator()
    validator.door, forged = keeper, _forged(good)
    for _ in range(PATIENCE + 1):  # requests of 256 values
        validator.sender = me.peer_id
        assert not any(validator.validate(forged) for _ in range(256))
    assert 0 < len(looked_at) <= row.sender.burst
    blamed = keeper.refused["stranger", VALUE_KIND, Reason.CONTENT]
    assert blamed == len(looked_at)
    assert keeper.refused["stranger", VALUE_KIND, Reason.MUTED] > 0
    other = identity_of_seed(b"\x02" * 32)
    validator.sender = other.peer_id
    assert validator.validate(_brought(other, 0))
    validator.sender = None
    assert validator.validate(good), "what this node has found itself is no sender's"
