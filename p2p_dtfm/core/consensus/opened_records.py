"""Records that were opened lately: members send the same ones again and again.

They are bounded by the memory that they take once opened, which is more than their bytes. A link
with a short name has ten bytes, and takes twenty times as many here.
"""

from collections.abc import Callable, Iterable

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.signed import Signed

OPENED_LIMIT = 4096
OPENED_LIMIT_BYTES = 64 << 20
"""In a swarm in which all have a link to each of 64 others, a record takes some 25 KiB."""
OPENED_LINK_BYTES = 320
NEWCOMER_RECORD_BYTES = 8 * 1024
LINK_BYTES = 128
"""A newcomer's record may have `NEWCOMER_RECORD_BYTES`, and `LINK_BYTES` more for each member, to
which it may have a link."""
NEWCOMER_LINKS = 64
"""Links to other newcomers that a newcomer's record may have, beside those to members."""
FEW_MEMBERS = 64
"""A peer that knows nothing of a view assumes that it may have this many members. Where there are
more, links are brief; so members of many let in no larger record either. Others that wait would
take them for faulty who pass it on."""


class OpenedRecords:
    """Opened records, by what was signed."""

    def __init__(self, opener: Callable[[Signed], PeerRecord]) -> None:
        self._opener = opener
        self._opened: dict[Signed, PeerRecord] = {}
        self._held_bytes = 0

    def __len__(self) -> int:
        return len(self._opened)

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def find(self, signed: Signed) -> PeerRecord | None:
        """A record that was opened before."""
        return self._opened.get(signed)

    def open(self, signed: Signed) -> PeerRecord:
        """The record; it is opened unless that was done lately. Raises `PeerFault`."""
        record = self._opened.get(signed)
        if record is None:
            record = self._opener(signed)
            self._keep(signed, record)
        return record

    def open_newcomer(self, signed: Signed) -> PeerRecord:
        """The same, for a peer that may be nobody's fellow: its record is bounded, by all peers
        alike. Raises `PeerFault`."""
        require_size(signed, FEW_MEMBERS)
        found = self._opened.get(signed)
        record = found if found is not None else self._opener(signed)
        require_few_links(record, FEW_MEMBERS)  # it may have been opened as that of a member
        if found is None:
            self._keep(signed, record)
        return record

    def keep_only(self, peer_ids: Iterable[str]) -> None:
        """Forget the records of all but these peers."""
        kept = frozenset(peer_ids)
        self._opened = {it: record for it, record in self._opened.items() if it.peer_id in kept}
        self._held_bytes = sum(opened_bytes(*item) for item in self._opened.items())

    def _keep(self, signed: Signed, record: PeerRecord) -> None:
        self._opened[signed] = record
        self._held_bytes += opened_bytes(signed, record)
        while self._held_bytes > OPENED_LIMIT_BYTES or len(self._opened) > OPENED_LIMIT:
            oldest = next(iter(self._opened))
            self._held_bytes -= opened_bytes(oldest, self._opened.pop(oldest))


def opened_bytes(signed: Signed, record: PeerRecord) -> int:
    """About how much memory both take."""
    return 2048 + 2 * len(signed.payload) + OPENED_LINK_BYTES * len(record.links)


def require_size(signed: Signed, member_count: int) -> None:
    """Raises `PeerFault` for a newcomer's record that says more than there is to say."""
    size = len(signed.payload)
    if size > NEWCOMER_RECORD_BYTES + LINK_BYTES * member_count:
        raise PeerFault(f"a newcomer's record of {size} bytes", signed.peer_id)


def require_few_links(record: PeerRecord, member_count: int) -> None:
    """Raises `PeerFault` for a newcomer's record with links to more peers than there can be."""
    if len(record.links) > member_count + NEWCOMER_LINKS:
        raise PeerFault(f"a newcomer's record with {len(record.links)} links", record.peer_id)
