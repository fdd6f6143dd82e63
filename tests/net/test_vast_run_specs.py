"""A run spec with a number that has no canonical bytes, brought to a node of the directory."""

from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.flat_values import FlatSerializer
from p2p_dtfm.net.directory.validator import DirectoryValidator
from p2p_dtfm.net.directory.values import key_bytes, run_key, sign_run
from p2p_dtfm.net.hivemind_parts import DHTRecord, get_dht_time
from tests.core.builders import run_spec


@pytest.mark.parametrize("is_brought", [True, False])
def test_a_vast_number_is_refused_like_any_forgery(tmp_path: Path, is_brought: bool) -> None:
    """`OverflowError` left the validator, in the midst of a stranger's request, or of the answer
    to one's own."""
    values = msgspec.msgpack.decode(run_spec().canonical_bytes())
    values["checkpoint"]["every_steps"] = "4" * 40
    own = Identity.load_or_create(tmp_path / "own")
    signed = sign_run(encode(values), own.peer_id, own.sign)
    key, until = key_bytes(run_key(digest_bytes(signed.payload))), get_dht_time() + 60
    validator = DirectoryValidator()
    validator.sender = own.peer_id if is_brought else None
    value = FlatSerializer.dumps(encode(signed))
    assert not validator.validate(DHTRecord(key, b"", value, until))
