"""What a node keeps of a run by invitation tells it nothing, and takes the room of one peer."""

import base58
import pytest

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.identity import identity_of_seed
from p2p_dtfm.net.directory.sealed import Seal, sealed_key
from p2p_dtfm.net.directory.validator import DirectoryValidator
from p2p_dtfm.net.directory.values import Presence, key_bytes, presence_key, sign_presence
from p2p_dtfm.net.hivemind_parts import get_dht_time

RUN = "ab" * 32
ADDRESS = "/ip4/198.51.100.7/tcp/31330"


def test_only_who_has_the_key_reads_or_finds_a_sealed_presence() -> None:
    me, eve = (identity_of_seed(bytes([number]) * 32) for number in (1, 2))
    seal, name = Seal(b"k" * 32), presence_key(RUN, 0)
    expires_ms = int((get_dht_time() + 90) * 1000)
    presence = sign_presence(Presence(me.peer_id, 1, (ADDRESS,), RUN, expires_ms), me.sign)
    closed = seal.close(name, presence, expires_ms, me.sign)
    value = encode(closed)
    assert seal.open(name, value) == presence
    for told in (RUN, ADDRESS, "198.51.100.7"):
        assert told.encode() not in value
    other = Seal(b"x" * 32)
    assert other.slot(name) != seal.slot(name)
    with pytest.raises(PeerFault, match="another key"):
        other.open(name, value)
    key, subkey = key_bytes(sealed_key(seal.slot(name))), base58.b58decode(me.peer_id)
    expires_s = expires_ms / 1000
    assert DirectoryValidator.refusal(key, subkey, value, expires_s) is None
    of_eve = base58.b58decode(eve.peer_id)
    assert "another peer" in (DirectoryValidator.refusal(key, of_eve, value, expires_s) or "")
    elsewhere = key_bytes(sealed_key(other.slot(name)))
    assert "not its own" in (DirectoryValidator.refusal(elsewhere, subkey, value, expires_s) or "")
    assert "another time" in (DirectoryValidator.refusal(key, subkey, value, expires_s + 9) or "")
