"""Values of the directory that hold values that hold values. Each level took 40 KB of the C stack.
So 200 levels, in 3 KB, ended the process of any reader, before anything was looked at."""

import subprocess
import sys
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest

from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.flat_values import ENTRIES_LIMIT, FlatSerializer
from p2p_dtfm.net.directory.values import VALUE_LIMIT_BYTES
from p2p_dtfm.net.hivemind_parts import (
    DHTID,
    DictionaryDHTValue,
    P2PHandlerError,
    PeerID,
    dht_pb2,
    get_dht_time,
)
from p2p_dtfm.net.libp2p.host import Host
from tests.net.net_support import hosts, run

DICTIONARY, TUPLE = 0x50, 0x40
LEVELS = 240


def nested(levels: int = LEVELS) -> bytes:
    """Dictionaries in dictionaries, as hivemind writes them."""
    inner = msgpack.packb([None, 0, []])
    for _ in range(levels):
        inner = msgpack.packb([msgpack.ExtType(DICTIONARY, inner), 0, []])
    return bytes(msgpack.packb(msgpack.ExtType(DICTIONARY, inner)))


def nested_tuples(levels: int = LEVELS) -> bytes:
    inner = msgpack.packb([])
    for _ in range(levels):
        inner = msgpack.packb([msgpack.ExtType(TUPLE, inner)])
    return bytes(msgpack.packb(msgpack.ExtType(TUPLE, inner)))


READ_IT = """
import sys
from p2p_dtfm.net.directory.entries import entries_of
from p2p_dtfm.net.directory.validator import DirectoryValidator
from p2p_dtfm.net.hivemind_parts import DHTRecord, DictionaryDHTValue, get_dht_time
value = bytes.fromhex(sys.argv[1])
now = get_dht_time() + 60
assert not DirectoryValidator().validate(DHTRecord(bytes(20), b"", value, now))
assert not DirectoryValidator().validate(DHTRecord(bytes(20), value[:64], value, now))
held = DictionaryDHTValue()
held.store(b"a", value, now)
assert entries_of(held) == []
print("read")
"""


@pytest.mark.parametrize("value", [nested(), nested_tuples()], ids=["dictionaries", "tuples"])
def test_what_is_nested_does_not_end_who_reads_it(value: bytes) -> None:
    assert len(value) <= VALUE_LIMIT_BYTES, "small enough to be let in"
    done = subprocess.run(
        [sys.executable, "-c", READ_IT, value.hex()],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "read\n"), done.stderr


def test_a_dictionary_is_read_as_it_was_written() -> None:
    written = DictionaryDHTValue()
    written.store(b"one", b"value", get_dht_time() + 60)
    written.store(b"two", b"other", get_dht_time() + 90)
    read = FlatSerializer.loads(FlatSerializer.dumps(written))
    assert isinstance(read, DictionaryDHTValue)
    assert dict(read.items()) == dict(written.items())
    assert read.latest_expiration_time == written.latest_expiration_time
    assert FlatSerializer.loads(FlatSerializer.dumps(b"plain")) == b"plain"


def _dictionary(*items: object) -> bytes:
    body = msgpack.packb([None, 0.0, list(items)])
    return bytes(msgpack.packb(msgpack.ExtType(DICTIONARY, body)))


@pytest.mark.parametrize(
    "value",
    [
        nested(2),
        nested_tuples(1),
        _dictionary(*([bytes([i % 256, i // 256]), b"", 1.0] for i in range(ENTRIES_LIMIT + 1))),
        _dictionary(["text", b"", 1.0]),
        _dictionary([b"a", "text", 1.0]),
        _dictionary([b"a", b"", "soon"]),
        _dictionary([b"a", b""]),
        _dictionary(7),
        bytes(msgpack.packb(msgpack.ExtType(DICTIONARY, b"\x07"))),
        bytes(msgpack.packb(msgpack.ExtType(7, b"what"))),
    ],
)
def test_what_no_node_of_ours_writes_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError):
        FlatSerializer.loads(value)


async def _pushed(liar: Directory, target: Host, value: bytes, subkey: bytes) -> list[bool]:
    """What a node answers to a request that hivemind's own caller would not make."""
    protocol = liar._node.protocol
    request = dht_pb2.StoreRequest(
        keys=[DHTID.generate().to_bytes()],
        subkeys=[subkey],
        values=[value],
        expiration_time=[get_dht_time() + 60],
        in_cache=[False],
        peer=protocol.node_info,
    )
    response = await protocol.get_stub(PeerID.from_base58(target.peer_id)).rpc_store(request)
    return list(response.store_ok)


def test_a_node_lives_on_whatever_it_is_to_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (node, liar):
            served = await Directory.start(node)
            lying = await Directory.start(liar, list(await node.addresses()))
            regular = served._node.protocol.IS_REGULAR_VALUE
            for value in (nested(), nested_tuples()):
                assert await _pushed(lying, node, value, regular) == [False]
                with pytest.raises(P2PHandlerError):  # as for any malformed request
                    await _pushed(lying, node, value, served._node.protocol.IS_DICTIONARY)
            await lying.meet([node.peer_id])
            assert len(lying.nodes) == 1, "it answers still"

    run(scenario())
