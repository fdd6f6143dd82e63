"""The links of records by the ids of the peers to which they lead, however a record names these."""

from collections.abc import Iterable, Mapping

import msgspec

from p2p_dtfm.core.protocol.facts.brief_links import Link, measured_links, short_name
from p2p_dtfm.core.protocol.records import PeerRecord


class MemberLinks:
    """The links among these peers. A short name that two of them share means neither."""

    def __init__(self, peer_ids: Iterable[str]) -> None:
        self._peer_ids = tuple(peer_ids)
        self._named: dict[bytes, str] | None = None

    def of(self, record: PeerRecord) -> Mapping[str, Link]:
        """A record's links, not to be changed; those of a brief record only to these peers."""
        if record.brief is msgspec.UNSET:
            return record.links
        if self._named is None:
            self._named = _by_short_name(self._peer_ids)
        named, links = self._named, measured_links(record.brief)
        return {named[short]: link for short, link in links.items() if short in named}


def _by_short_name(peer_ids: Iterable[str]) -> dict[bytes, str]:
    found, shared = dict[bytes, str](), set[bytes]()
    for peer_id in peer_ids:
        short = short_name(peer_id)
        if short in found:
            shared.add(short)
        found[short] = peer_id
    return {short: peer_id for short, peer_id in found.items() if short not in shared}
