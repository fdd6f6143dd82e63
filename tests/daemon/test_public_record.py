"""A member's published record fits into the directory, however much there is to say."""

from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.consensus.opened_records import OpenedRecords
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.facts.brief_links import measured_links
from p2p_dtfm.core.protocol.records import (
    ADDRESSES_LIMIT,
    LIFE_LIMIT,
    NAME_LIMIT,
    Link,
    PeerRecord,
    open_record,
)
from p2p_dtfm.core.protocol.signed import signing_in
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.daemon.peers.self_record import LINKS_KEPT, LINKS_TOLD, PUBLIC_LINKS, SelfRecord
from p2p_dtfm.net.contacts.identity import Identity, verify
from p2p_dtfm.net.directory.facts import (
    PublishedFacts,
    PublishedPart,
    facts_key,
    open_facts,
    sign_facts,
)
from p2p_dtfm.net.directory.validator import DirectoryValidator
from p2p_dtfm.net.directory.values import key_bytes
from p2p_dtfm.net.hivemind_parts import get_dht_time
from tests.core.builders import device

RUN = "ab" * 32
MOST = (1 << 60) - 1
PLACE = PublishedPart(MOST, RUN, *[MOST] * 7)
SOMEBODY = "12D3KooWRbpEJ767DUrmMgm1PApxQQP6RGu8ZLY4XCYqd54Aiw"


def published(own: Identity, link_count: int, address_count: int, long: int = 0) -> PeerRecord:
    """The record as a node of the directory takes it."""
    widest = msgspec.structs.replace(device(), kind="k" * NAME_LIMIT, name="n" * NAME_LIMIT)
    relayed = f"/ip4/255.255.255.255/tcp/65535/p2p/{SOMEBODY}aa/p2p-circuit/p2p/{own.peer_id}"
    addresses = tuple(f"/dns4/{'h' * long}{n}{relayed}" for n in range(address_count))
    record = SelfRecord(Member(own.peer_id, LIFE_LIMIT - 1), RUN, widest, addresses, None)  # type: ignore[arg-type]
    record.state_name("ö" * 24)
    record.state_line(MOST, MOST)
    peers = [f"{SOMEBODY}{n:02}" for n in range(link_count)]
    record._links.update({peer: Link(40_000_000_000 + n, MOST) for n, peer in enumerate(peers)})
    sign = signing_in(RUN, own.sign)
    record.make(sign)
    when_ms = int((get_dht_time() + 60) * 1000)
    signed = sign_facts(PublishedFacts(when_ms, record.make_public(sign), PLACE), own.sign)
    key = key_bytes(facts_key(RUN, own.peer_id))
    assert DirectoryValidator.refusal(key, None, encode(signed), when_ms / 1000) is None
    return open_facts(signed).record


@pytest.mark.parametrize(
    ("link_count", "address_count", "long"),
    [(24, 16, 0), (PUBLIC_LINKS, ADDRESSES_LIMIT, 80), (200, ADDRESSES_LIMIT, 80)],
)
def test_facts_fit_into_the_directory(
    link_count: int, address_count: int, long: int, tmp_path: Path
) -> None:
    told = published(Identity.load_or_create(tmp_path / "own"), link_count, address_count, long)
    assert told.brief is not msgspec.UNSET, "links in a few bytes, so that addresses have room"
    assert measured_links(told.brief) and told.addresses


def test_what_fits_is_said_exactly(tmp_path: Path) -> None:
    told = published(Identity.load_or_create(tmp_path / "own"), PUBLIC_LINKS, 4)
    assert told.brief is msgspec.UNSET and len(told.links) == PUBLIC_LINKS
    assert len(told.addresses) == 4


def test_who_has_met_many_comes_back_with_a_record_of_a_newcomers_size(tmp_path: Path) -> None:
    """Links to all peers that had come and gone made the record so large that nobody let its maker
    in."""
    own = Identity.load_or_create(tmp_path / "own")
    record = SelfRecord(Member(own.peer_id, 1), RUN, device(), (), None)  # type: ignore[arg-type]
    peers = [f"{SOMEBODY}{n:03}" for n in range(LINKS_KEPT)]
    record._links.update({peer: Link(40_000_000, MOST) for peer in peers})
    members = frozenset(peers[:5])
    record.state_swarm(members | {own.peer_id})
    record.begin_life(Member(own.peer_id, 2))
    said, signed = record.make(own.sign)
    opener = OpenedRecords(lambda it: open_record(it, RUN, verify))
    assert opener.open_newcomer(signed) == said
    last = set(peers[5 - LINKS_TOLD :])
    assert said.links.keys() == members | last, "those it has met last may come back"
    record.state_swarm(frozenset(peers[:60]))
    assert set(peers[:60]) < record.make(own.sign)[0].links.keys()
