"""A peer's record: what it says of itself and of its links, and which of two records counts."""

from enum import StrEnum

import msgspec

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.brief_links import (
    BriefLinks,
    fault_of_brief,
    measured_links,
    short_name,
)
from p2p_dtfm.core.protocol.facts.brief_links import Link as Link  # part of a record
from p2p_dtfm.core.protocol.measured_plans import MeasuredPlan, is_sane
from p2p_dtfm.core.protocol.names import fault_of_name, generated_name
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify, open_signed, sign

PROTOCOL_VERSION = 2
RECORD_LIMIT_BYTES = 64 * 1024
NAME_LIMIT = 64
ADDRESSES_LIMIT = 16
ADDRESS_LIMIT = 256
LINKS_LIMIT = 1024 + 64
"""As many members as there may be, and some that were."""
_KIND = "record"


class Intent(StrEnum):
    TRAIN = "train"
    SPARE = "spare"
    LEAVING = "leaving"


class Reachability(StrEnum):
    DIRECT = "direct"
    RELAYED = "relayed"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


class LayerTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured time of one layer for one microbatch."""

    forward_ns: int
    backward_ns: int


ACCELERATOR = "cuda"
"""The kind of a device with memory of its own."""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer computes with, measured at the run's microbatch shape."""

    kind: str
    name: str
    memory_bytes: int
    """Memory that training may use."""
    embedding: LayerTiming
    block: LayerTiming
    head: LayerTiming


class PeerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Integers and strings only, so that its bytes are equal everywhere.

    `life` grows with each start of the process; `sequence` grows within a life. An uplink or
    downlink of 0 bytes/s means that no shared limit is known.
    """

    peer_id: str
    life: int
    sequence: int
    protocol_version: int
    run_digest: str
    device: Device
    uplink_bytes_per_s: int
    downlink_bytes_per_s: int
    links: dict[str, Link]
    addresses: tuple[str, ...]
    reachability: Reachability
    intent: Intent
    measured: tuple[MeasuredPlan, ...] = ()
    """What steps took under the last plans."""
    name: str | msgspec.UnsetType = msgspec.UNSET
    """As its owner calls it; who gives none is called as its identity makes it, and says nothing
    of it."""
    brief: BriefLinks | msgspec.UnsetType = msgspec.UNSET
    """In a large swarm, in place of `links`."""

    def link_to(self, peer_id: str) -> Link | None:
        """As this peer has measured it, if it says so."""
        if self.brief is msgspec.UNSET:
            return self.links.get(peer_id)
        return measured_links(self.brief).get(short_name(peer_id))

    @property
    def link_count(self) -> int:
        """Of measured ones."""
        return len(self.links if self.brief is msgspec.UNSET else measured_links(self.brief))

    @property
    def called(self) -> str:
        """For people. Text of a stranger, unless it is made of the id."""
        return generated_name(self.peer_id) if self.name is msgspec.UNSET else self.name

    @property
    def version(self) -> tuple[int, int]:
        """Of two records of a peer, the one with the higher version counts."""
        return (self.life, self.sequence)


def sign_record(record: PeerRecord, signer: Sign) -> Signed:
    """The record as its peer publishes it."""
    return sign(record.peer_id, _KIND, encode(record), signer)


def open_record(signed: Signed, run_digest: str, verify: Verify) -> PeerRecord:
    """Check a record that arrived: signature, owner, protocol, run. Raises `PeerFault`."""
    if len(signed.payload) > RECORD_LIMIT_BYTES:
        raise PeerFault(f"record of {len(signed.payload)} bytes", signed.peer_id)
    record = open_signed(signed, _KIND, PeerRecord, verify)
    if record.peer_id != signed.peer_id:
        raise PeerFault(f"signed a record of another peer, {record.peer_id}", signed.peer_id)
    if record.protocol_version != PROTOCOL_VERSION:
        raise PeerFault(
            f"speaks protocol {record.protocol_version}, this peer {PROTOCOL_VERSION}: "
            "one of the two must update",
            signed.peer_id,
        )
    if record.run_digest != run_digest:
        raise PeerFault(
            f"takes part in run {record.run_digest[:12]}, this swarm trains {run_digest[:12]}",
            signed.peer_id,
        )
    _require_sane_names(record)
    _require_sane_numbers(record)
    if record.brief is not msgspec.UNSET:
        fault = "links told twice" if record.links else fault_of_brief(record.brief)
        if fault:
            raise PeerFault(f"record with {fault}", record.peer_id)
    return record


def is_peer_id(text: str) -> bool:
    """Whether it could name a peer."""
    return 0 < len(text) <= NAME_LIMIT and text.isascii() and text.isprintable()


def _require_sane_names(record: PeerRecord) -> None:
    names = (record.peer_id, *record.links)
    if len(record.links) > LINKS_LIMIT or not all(map(is_peer_id, names)):
        raise PeerFault("record with links to what cannot be peers", record.peer_id)
    if len(record.addresses) > ADDRESSES_LIMIT:
        raise PeerFault(f"record with {len(record.addresses)} addresses", record.peer_id)
    if any(len(address) > ADDRESS_LIMIT for address in record.addresses):
        raise PeerFault("record with an address that is too long", record.peer_id)
    if max(len(record.device.name), len(record.device.kind)) > NAME_LIMIT:
        raise PeerFault("record with a device's name that is too long", record.peer_id)
    if record.name is not msgspec.UNSET and (fault := fault_of_name(record.name)):
        raise PeerFault(f"record with a name that {fault}", record.peer_id)


def _require_sane_numbers(record: PeerRecord) -> None:
    timings = (record.device.embedding, record.device.block, record.device.head)
    numbers = [record.life, record.sequence, record.device.memory_bytes]
    numbers += [value for timing in timings for value in (timing.forward_ns, timing.backward_ns)]
    numbers += [record.uplink_bytes_per_s, record.downlink_bytes_per_s]
    numbers += [
        value for link in record.links.values() for value in (link.round_trip_ns, link.bytes_per_s)
    ]
    if any(not 0 <= number < 1 << 60 for number in numbers):
        raise PeerFault("record with a number below 0 or above 2^60", record.peer_id)
    if not is_sane(record.measured):
        raise PeerFault("record with steps measured under no plan", record.peer_id)
