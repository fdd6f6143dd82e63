"""A peer's record: what it says of itself and of its links, and which of two records counts."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.brief_links import (
    BriefLinks,
    fault_of_brief,
    measured_links,
    short_name,
)
from p2p_dtfm.core.protocol.facts.brief_links import Link as Link  # part of a record
from p2p_dtfm.core.protocol.facts.device_facts import DeviceFacts, fault_of_facts
from p2p_dtfm.core.protocol.facts.seen_paces import is_possible
from p2p_dtfm.core.protocol.layers.listed import MOST_LAYERS
from p2p_dtfm.core.protocol.measured_plans import MeasuredPlan, is_sane
from p2p_dtfm.core.protocol.names import fault_of_name, generated_name
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify, open_signed, sign

PROTOCOL_VERSION = 2
RECORD_LIMIT_BYTES = 64 * 1024
NAME_LIMIT = 64
LIFE_LIMIT = 1 << 53
"""Others name a life in what they sign (`messages.message_bounds.NUMBER_LIMIT`)."""
ADDRESSES_LIMIT = 16
ADDRESS_LIMIT = 256
DIGEST_BYTES = 32
LINKS_LIMIT = 1024 + 64
"""As many links as there may be members, and some to former ones."""
LAYER_LIMIT_NS = 1 << 46
"""A layer's forward, or its backward, of one microbatch takes less than twenty hours. The pace that
others tell of a peer (`facts.seen_paces`) sums many of these, and must fit into a record."""
MOST_TIMES = 6 + 2 * MOST_LAYERS
"""Times of a device: of three kinds of layers, and of each distinct layer that a run lists."""
RECORD_KIND = "record"


Value = TypeVar("Value")


class Intent(StrEnum):
    TRAIN = "train"
    SPARE = "spare"
    LEAVING = "leaving"


class Reachability(StrEnum):
    DIRECT = "direct"
    RELAYED = "relayed"
    UNREACHABLE = "unreachable"
    UNKNOWN = "unknown"


INTENTS, REACHABILITIES = tuple(Intent), tuple(Reachability)
"""A packed record holds the index into these."""


class LayerTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured time of one layer for one microbatch."""

    forward_ns: int
    backward_ns: int


ACCELERATOR = "cuda"
"""The kind of a device with memory of its own."""
PROCESSOR = "cpu"
"""The kind of a device that computes in its host's memory, where sums of gradients are, too."""


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer computes with, measured at the run's microbatch shape."""

    kind: str
    name: str
    memory_bytes: int
    """Memory that training may use."""
    embedding: LayerTiming
    block: LayerTiming
    head: LayerTiming
    facts: DeviceFacts | msgspec.UnsetType = msgspec.UNSET
    """What the device is; unset for emulated devices."""
    listed: tuple[LayerTiming, ...] | msgspec.UnsetType = msgspec.UNSET
    """Where a run lists its layers: the times of each distinct one, in the order of the workload's
    costs."""

    @property
    def unlike(self) -> tuple[LayerTiming, ...]:
        """`listed`, or nothing where a run's layers are a GPT's."""
        return () if self.listed is msgspec.UNSET else self.listed

    @property
    def guarding_bytes(self) -> int:
        """Bytes that may hold layers of others. A peer with an accelerator keeps them in its host's
        memory; if it says nothing of that, it counts as having as much as the device."""
        if self.kind != ACCELERATOR or self.facts is msgspec.UNSET:
            return self.memory_bytes
        return self.facts.host_free_bytes


class PeerRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer says of itself, in integers and strings only, so that its bytes are equal
    everywhere.

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
    """The name that its owner gave. Without one the name follows from the peer's id, and is left
    out here."""
    brief: BriefLinks | msgspec.UnsetType = msgspec.UNSET
    """Stands in place of `links` in a large swarm."""
    paces: dict[str, int] = {}
    """How slowly it has seen others compute that say they are faster (`facts.seen_paces`)."""

    def link_to(self, peer_id: str) -> Link | None:
        """The link to a peer as this peer has measured it; None if the record does not say."""
        if self.brief is msgspec.UNSET:
            return self.links.get(peer_id)
        return measured_links(self.brief).get(short_name(peer_id))

    def links_among(self, peer_ids: Iterable[str]) -> dict[str, Link]:
        """The links that lead to these peers; all links, where the record names all."""
        if self.brief is msgspec.UNSET:
            return self.links
        known = ((peer_id, self.link_to(peer_id)) for peer_id in peer_ids)
        return {peer_id: link for peer_id, link in known if link is not None}

    @property
    def called(self) -> str:
        """The peer's name for people. It is a stranger's text, unless it is made from the id."""
        return generated_name(self.peer_id) if self.name is msgspec.UNSET else self.name

    @property
    def version(self) -> tuple[int, int]:
        """Of two records of a peer, the one with the higher version counts."""
        return (self.life, self.sequence)


class PackedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A record as it is signed and sent: values alone, without the peer's id, which stands beside
    the signature. In a large swarm, records are most of what founding costs."""

    protocol_version: int
    run: bytes
    """The run's digest in binary; in simulations, where runs have other names, the name."""
    life: int
    sequence: int
    device: tuple[str, str, int]
    """Kind, name and memory."""
    layers_ns: Annotated[tuple[int, ...], msgspec.Meta(min_length=6, max_length=MOST_TIMES)]
    """Forward and backward of embedding, block and head; then of each distinct layer, where a run
    lists them."""
    facts: DeviceFacts | None
    rates_bytes_per_s: tuple[int, int]
    """Uplink and downlink."""
    links: dict[str, tuple[int, int]]
    brief: BriefLinks | None
    addresses: tuple[str, ...]
    reachability: Annotated[int, msgspec.Meta(ge=0, lt=len(REACHABILITIES))]
    """The index in `REACHABILITIES`."""
    intent: Annotated[int, msgspec.Meta(ge=0, lt=len(INTENTS))]
    measured: tuple[MeasuredPlan, ...]
    name: str | None
    paces: dict[str, int]


def packed(record: PeerRecord) -> PackedRecord:
    """The record in its packed form, without the peer's id."""
    device = record.device
    timings = (device.embedding, device.block, device.head, *device.unlike)
    forwards_and_backwards = [ns for each in timings for ns in (each.forward_ns, each.backward_ns)]
    return PackedRecord(
        record.protocol_version,
        _bytes_of(record.run_digest),
        record.life,
        record.sequence,
        (device.kind, device.name, device.memory_bytes),
        tuple(forwards_and_backwards),
        _or_none(device.facts),
        (record.uplink_bytes_per_s, record.downlink_bytes_per_s),
        {peer: (link.round_trip_ns, link.bytes_per_s) for peer, link in record.links.items()},
        _or_none(record.brief),
        record.addresses,
        REACHABILITIES.index(record.reachability),
        INTENTS.index(record.intent),
        record.measured,
        _or_none(record.name),
        record.paces,
    )


def unpacked(peer_id: str, told: PackedRecord) -> PeerRecord:
    """The record of this peer, who has signed it."""
    if len(told.layers_ns) % 2:
        raise PeerFault("record with a forward that has no backward", peer_id)
    pairs = range(0, len(told.layers_ns), 2)
    embedding, block, head, *unlike = (LayerTiming(*told.layers_ns[at : at + 2]) for at in pairs)
    return PeerRecord(
        peer_id,
        told.life,
        told.sequence,
        told.protocol_version,
        _text_of(told.run),
        Device(
            *told.device,
            embedding,
            block,
            head,
            _or_unset(told.facts),
            tuple(unlike) or msgspec.UNSET,
        ),
        *told.rates_bytes_per_s,
        {peer: Link(*link) for peer, link in told.links.items()},
        told.addresses,
        REACHABILITIES[told.reachability],
        INTENTS[told.intent],
        told.measured,
        _or_unset(told.name),
        _or_unset(told.brief),
        told.paces,
    )


def _bytes_of(run_digest: str) -> bytes:
    try:
        return bytes.fromhex(run_digest)
    except ValueError:
        return run_digest.encode()


def _text_of(run: bytes) -> str:
    return run.hex() if len(run) == DIGEST_BYTES else run.decode(errors="replace")


def _or_none(value: Value | msgspec.UnsetType) -> Value | None:
    return None if isinstance(value, msgspec.UnsetType) else value


def _or_unset(value: Value | None) -> Value | msgspec.UnsetType:
    return msgspec.UNSET if value is None else value


def payload_of(record: PeerRecord) -> bytes:
    """The bytes that a record's signature covers, besides the peer's id."""
    return encode(packed(record))


def sign_record(record: PeerRecord, signer: Sign) -> Signed:
    """The record as its peer publishes it."""
    return sign(record.peer_id, RECORD_KIND, payload_of(record), signer)


def run_of_record(signed: Signed) -> str:
    """The digest of the run that a record names, before the record is checked."""
    return _text_of(decode(signed.payload, PackedRecord, RECORD_LIMIT_BYTES).run)


def open_record(signed: Signed, run_digest: str, verify: Verify) -> PeerRecord:
    """Check a record that arrived: signature, owner, protocol, run. Raises `PeerFault`."""
    if len(signed.payload) > RECORD_LIMIT_BYTES:
        raise PeerFault(f"record of {len(signed.payload)} bytes", signed.peer_id)
    try:
        told = open_signed(signed, RECORD_KIND, PackedRecord, verify)
    except PeerFault as forged:  # the signature may hold in another run: then that is the fault
        raise _why_elsewhere(signed, run_digest) or forged from forged
    record = unpacked(signed.peer_id, told)
    if (elsewhere := _fault_of_place(record, run_digest)) is not None:
        raise elsewhere
    require_sane(record)
    return record


def require_sane(record: PeerRecord) -> None:
    """Raises `PeerFault` for a record that no peer states, whoever has passed it on."""
    _require_sane_names(record)
    _require_sane_numbers(record)
    if record.brief is not msgspec.UNSET:
        fault = "links told twice" if record.links else fault_of_brief(record.brief)
        if fault:
            raise PeerFault(f"record with {fault}", record.peer_id)


def _why_elsewhere(signed: Signed, run_digest: str) -> PeerFault | None:
    try:
        told = decode(signed.payload, PackedRecord, RECORD_LIMIT_BYTES)
    except PeerFault:
        return None
    return _fault_of_place(unpacked(signed.peer_id, told), run_digest)


def _fault_of_place(record: PeerRecord, run_digest: str) -> PeerFault | None:
    """The fault of a record of another protocol or another run; None if it is neither."""
    if record.protocol_version != PROTOCOL_VERSION:
        return PeerFault(
            f"speaks protocol {record.protocol_version}, this peer {PROTOCOL_VERSION}: "
            "one of the two must update",
            record.peer_id,
        )
    if record.run_digest != run_digest:
        return PeerFault(
            f"takes part in run {record.run_digest[:12]}, this swarm trains {run_digest[:12]}",
            record.peer_id,
        )
    return None


def is_plausible_peer_id(text: str) -> bool:
    """Whether the text could name a peer."""
    return 0 < len(text) <= NAME_LIMIT and text.isascii() and text.isprintable()


def _require_sane_names(record: PeerRecord) -> None:
    names = (record.peer_id, *record.links, *record.paces)
    if len(record.links) > LINKS_LIMIT or not all(map(is_plausible_peer_id, names)):
        raise PeerFault("record with links to, or paces of, what cannot be peers", record.peer_id)
    if len(record.addresses) > ADDRESSES_LIMIT:
        raise PeerFault(f"record with {len(record.addresses)} addresses", record.peer_id)
    if any(len(address) > ADDRESS_LIMIT for address in record.addresses):
        raise PeerFault("record with an address that is too long", record.peer_id)
    if max(len(record.device.name), len(record.device.kind)) > NAME_LIMIT:
        raise PeerFault("record with a device's name that is too long", record.peer_id)
    facts = record.device.facts
    if facts is not msgspec.UNSET and (fault := fault_of_facts(facts)):
        raise PeerFault(f"record with {fault}", record.peer_id)
    if record.name is not msgspec.UNSET and (fault := fault_of_name(record.name)):
        raise PeerFault(f"record with a name that {fault}", record.peer_id)


def _require_sane_numbers(record: PeerRecord) -> None:
    device = record.device
    timings = (device.embedding, device.block, device.head, *device.unlike)
    times_ns = [ns for timing in timings for ns in (timing.forward_ns, timing.backward_ns)]
    if any(not 0 <= ns < LAYER_LIMIT_NS for ns in times_ns):
        raise PeerFault(
            "record with a layer that takes less than no time, or most of a day", record.peer_id
        )
    numbers = [record.life, record.sequence, record.device.memory_bytes]
    numbers += [record.uplink_bytes_per_s, record.downlink_bytes_per_s]
    numbers += [
        value for link in record.links.values() for value in (link.round_trip_ns, link.bytes_per_s)
    ]
    if any(not 0 <= number < 1 << 60 for number in numbers):
        raise PeerFault("record with a number below 0 or above 2^60", record.peer_id)
    if record.life >= LIFE_LIMIT:
        raise PeerFault("record of a life that no message may name", record.peer_id)
    if not is_sane(record.measured):
        raise PeerFault("record with steps measured under no plan", record.peer_id)
    if not is_possible(record.paces):
        raise PeerFault("record with paces that nobody has", record.peer_id)
