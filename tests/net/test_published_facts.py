"""Anybody with a DHT client reads what members say of themselves; nobody says it for them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import Link, PeerRecord, sign_record
from p2p_dtfm.core.protocol.signed import Signed, signing_in
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.facts import (
    PublishedFacts,
    PublishedPart,
    facts_key,
    open_facts,
    sign_facts,
)
from p2p_dtfm.net.directory.held_facts import OTHERS_LIMIT_BYTES, HeldFacts
from p2p_dtfm.net.directory.validator import DirectoryValidator
from p2p_dtfm.net.directory.values import VALUE_LIMIT_BYTES, key_bytes, sign_run
from p2p_dtfm.net.hivemind_parts import DHTID, MSGPackSerializer, PeerID, get_dht_time
from p2p_dtfm.net.libp2p.host import Host
from tests.core.builders import record, run_spec
from tests.net.net_support import hosts, run

SPEC = run_spec().canonical_bytes()
RUN = digest_bytes(SPEC)
PLACE = PublishedPart(3, "ab" * 32, 0, 1, 2, 5, 8, 100, 250_000_000)


def told(identity: Identity, sequence: int = 1, **changes: object) -> Signed:
    made: PeerRecord = record(identity.peer_id, sequence=sequence, **changes)  # type: ignore[arg-type]
    return sign_record(made, signing_in(made.run_digest, identity.sign))


Value = tuple[bytes, bytes | None, bytes, float]


def value_of(identity: Identity, signed: Signed, key: bytes | None = None) -> Value:
    expires_ms = int((get_dht_time() + 60) * 1000)
    facts = sign_facts(PublishedFacts(expires_ms, signed, PLACE), identity.sign)
    own = key_bytes(facts_key(RUN, identity.peer_id))
    return key or own, None, encode(facts), expires_ms / 1000


def forgeries(folder: Path) -> dict[str, Value]:
    own, other = (Identity.load_or_create(folder / name) for name in ("own", "other"))
    good = value_of(own, told(own))
    key, _, value, when = good
    facts = PublishedFacts(int(when * 1000), told(own), PLACE)
    stolen = msgspec.structs.replace(sign_facts(facts, own.sign), peer_id=other.peer_id)
    for_another = msgspec.structs.replace(
        sign_facts(msgspec.structs.replace(facts, record=told(other)), own.sign),
        peer_id=own.peer_id,
    )
    forged = told(own)
    forged = msgspec.structs.replace(forged, signature=bytes(64))
    nowhere = msgspec.structs.replace(facts, place=msgspec.structs.replace(PLACE, stage=-1))
    many = {f"peer-{number}": Link(1, 1) for number in range(400)}
    return {
        "good": good,
        "in a dictionary": (key, own.peer_id.encode(), value, when),
        "under another's key": value_of(own, told(own), key_bytes(facts_key(RUN, other.peer_id))),
        "under another run": value_of(own, told(own), key_bytes(facts_key("cd" * 32, own.peer_id))),
        "longer than signed": (key, None, value, when + 30),
        "already over": (key, None, value, when - 1000),
        "changed": (key, None, value[:-1] + bytes([value[-1] ^ 1]), when),
        "another's statement": (key, None, encode(stolen), when),
        "about another": (key, None, encode(for_another), when),
        "with a forged record": value_of(own, forged),
        "with a place that cannot be": (key, None, encode(sign_facts(nowhere, own.sign)), when),
        "of another protocol": value_of(own, told(own, protocol_version=999)),
        "with numbers that cannot be": value_of(own, told(own, uplink_bytes_per_s=-1)),
        "too large": value_of(own, told(own, links=many)),
        "garbage": (key, None, b"\xc1\xff", when),
    }


def test_the_validator_takes_the_good_and_refuses_each_forgery(tmp_path: Path) -> None:
    for name, value in forgeries(tmp_path).items():
        refusal = DirectoryValidator.refusal(*value)
        assert (refusal is None) == (name == "good"), f"{name}: {refusal}"


async def _bring(liar: Directory, target: Host, value: Value) -> bool:
    """Whether a node takes this value from another one."""
    key, _, content, expires = value
    stored = await liar._node.protocol.call_store(
        PeerID.from_base58(target.peer_id),
        [DHTID.from_bytes(key)],
        [MSGPackSerializer.dumps(content)],
        [expires],
        [None],
    )
    return bool((stored or [False])[0])


def test_a_stranger_reads_them_and_what_is_old_or_anothers_is_refused(tmp_path: Path) -> None:
    """The hosts are a member, a node that checks nothing, and a stranger who only asks."""

    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (member, liar, stranger):
            at = list(await member.addresses())
            members, liars = await Directory.start(member), await Directory.start(liar, at)
            asking = await Directory.start(stranger, at, serves=False)
            own, other = member.identity, liar.identity
            await members.publish_run(RUN, sign_run(SPEC, own.peer_id, own.sign))
            links = {other.peer_id: Link(30_000_000, 5_000_000)}
            for sequence in (5, 6):  # the member renews its facts
                signed = told(own, sequence=sequence, links=links)
                assert await members.publish_facts(RUN, signed, PLACE)
                await asyncio.sleep(0.01)
            found = (await asking.facts_of(RUN, [own.peer_id, other.peer_id]))[own.peer_id]
            assert found.record.sequence == 6 and found.record.links == links
            assert found.place == PLACE and found.record.device.block.forward_ns > 0
            assert await asking.facts_of("ef" * 32, [own.peer_id]) == {}

            liars._node.protocol.record_validator = None
            assert not await _bring(liars, member, value_of(own, told(own, sequence=9)))
            assert not await _bring(liars, member, value_of(other, told(own, sequence=9)))
            assert await _bring(liars, member, value_of(other, told(other, sequence=9)))
            stale = value_of(other, told(other, sequence=8))
            assert not await _bring(liars, member, stale)
            elsewhere = run_spec(seed=3).digest()
            lost = told(other, run_digest=elsewhere)
            nowhere = key_bytes(facts_key(elsewhere, other.peer_id))
            assert not await _bring(liars, member, value_of(other, lost, nowhere))
            found = await asking.facts_of(RUN, [own.peer_id, other.peer_id])
            assert {it: found[it].record.sequence for it in found} == {
                own.peer_id: 6,
                other.peer_id: 9,
            }
            for directory in (members, liars, asking):
                await directory.close()

    run(scenario())


def test_what_is_kept_for_others_is_bounded() -> None:
    held = HeldFacts()
    count = OTHERS_LIMIT_BYTES // VALUE_LIMIT_BYTES
    for number in range(count):
        key = number.to_bytes(20, "big")
        assert held.refusal(key, (1, 1), VALUE_LIMIT_BYTES, 100.0, 0.0) is None
    assert held.refusal(bytes(19), (1, 1), VALUE_LIMIT_BYTES, 100.0, 0.0) is not None
    assert held.refusal(bytes(20), (1, 1), VALUE_LIMIT_BYTES, 300.0, 0.0) is None
    assert "is known" in str(held.refusal(bytes(20), (1, 0), VALUE_LIMIT_BYTES, 300.0, 0.0))
    assert held.others_bytes == OTHERS_LIMIT_BYTES
    assert held.refusal(bytes(19), (1, 1), VALUE_LIMIT_BYTES, 400.0, 200.0) is None
    assert held.others_bytes == 2 * VALUE_LIMIT_BYTES
    assert held.refusal(bytes(18), (1, 1), 0, 300.0, 200.0) is None
    assert held.others_bytes == 2 * VALUE_LIMIT_BYTES


def test_a_newer_life_is_in_the_way_of_an_older_one_only_while_its_word_lives() -> None:
    """A member whose clock had been ahead lost its home's number of lives, and began a lower one.
    Nodes that had heard the other one refused its facts for as long as they lived."""
    held = HeldFacts()
    assert held.refusal(b"key", (9, 1), 0, 240.0, 0.0) is None
    assert held.refusal(b"key", (8, 7), 0, 300.0, 239.0) is not None
    assert held.refusal(b"key", (8, 7), 0, 480.0, 241.0) is None
    assert held.refusal(b"key", (8, 6), 0, 490.0, 250.0) is not None


def test_facts_of_somebody_else_are_no_facts(tmp_path: Path) -> None:
    own = Identity.load_or_create(tmp_path / "own")
    facts = sign_facts(PublishedFacts(1, told(own), None), own.sign)
    assert open_facts(facts).place is None
    with pytest.raises(PeerFault, match="forged"):
        open_facts(msgspec.structs.replace(facts, signature=bytes(64)))
