"""What a node of ours stores for others: only values whose key, owner and size are right.

A presence is stored only for a run that is known here, and only when its own peer brings it. So a
thousand invented peers need a thousand connections. A run spec has to be valid. All is bounded.
"""

import collections
import logging
from collections.abc import Callable

import base58

from p2p_dtfm.core.protocol.canonical import decode, digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.net.contacts.identity import is_peer_id
from p2p_dtfm.net.directory.facts import FACTS_KIND, facts_key, open_facts
from p2p_dtfm.net.directory.flat_values import FlatSerializer
from p2p_dtfm.net.directory.held_facts import ENTRY_BYTES, HeldFacts
from p2p_dtfm.net.directory.sealed import SEALED_KIND, open_sealed, sealed_key
from p2p_dtfm.net.directory.values import (
    PRESENCE_KIND,
    RUN_KIND,
    VALUE_LIMIT_BYTES,
    key_bytes,
    open_presence,
    open_signed_bytes,
    presence_key,
    run_key,
    shard_of,
)
from p2p_dtfm.net.door import Door, OpenDoor
from p2p_dtfm.net.errors import one_line
from p2p_dtfm.net.hivemind_parts import (
    DHTRecord,
    RecordValidatorBase,
    get_dht_time,
)

PRESENCE_TTL_LIMIT_S = 300.0
RUN_TTL_LIMIT_S = 900.0
PEERS_PER_SHARD_LIMIT = 900
"""With values of 4 KiB a full shard stays below 4 MiB, above which a DHT reply is lost."""
RUNS_LIMIT = 128
STORED_LIMIT_BYTES = 16 << 20
"""The most bytes stored for runs that are not this node's own, with `ENTRY_BYTES` for each
value."""
SLOTS_LIMIT = 8
"""The most sealed values of one peer. A peer is in one run, where it has one value."""
VALUE_KIND = "directory value"
# Clocks may differ by as much as the DHT itself tolerates.
_SKEW_S = 3.0

log = logging.getLogger(__name__)


class DirectoryValidator(RecordValidatorBase):  # type: ignore[misc]
    """Asked about each value that is to be stored here, and each that is found elsewhere."""

    def __init__(self) -> None:
        self._sender: str | None = None
        self._is_tired = False
        """Whether the door looks at no more values of this request."""
        self.door: Door = OpenDoor()
        self.forget_run: Callable[[bytes], None] = lambda key: None
        """Told the key of a run spec that gives way to a newer one."""
        self.on_unknown_run: Callable[[str], None] = lambda run_digest: None
        self.turned_away: dict[str, str] = {}
        """Why each peer refused through which the node was to begin, by peer."""
        self._own: set[str] = set()
        self._runs: collections.OrderedDict[str, float] = collections.OrderedDict()
        self._members: dict[bytes, dict[bytes, tuple[float, int]]] = {}
        self._slots: dict[bytes, dict[bytes, float]] = {}
        """By peer that brings sealed values: where each stands, and until when."""
        self._stored_bytes = 0
        self._facts = HeldFacts()

    @property
    def sender(self) -> str | None:
        """The peer that brings what is validated now; None where this node has found it itself."""
        return self._sender

    @sender.setter
    def sender(self, sender: str | None) -> None:
        self._sender, self._is_tired = sender, False

    def own(self, run_digest: str) -> None:
        """Note a run that this node takes part in, or looks for. It does not give way to others."""
        self._own.add(run_digest)

    def learn(self, run_digest: str) -> None:
        """Note a run of others, whose spec this node has seen."""
        now = get_dht_time()
        self._remember_run(run_digest, now + RUN_TTL_LIMIT_S)

    @property
    def stored_bytes(self) -> int:
        """Bytes of others' presences in runs that are not this node's own."""
        return self._stored_bytes

    @property
    def runs(self) -> int:
        """Runs of others that are known here."""
        return len(self._runs)

    def run_keys(self) -> list[bytes]:
        """Keys of the run specs known here, which anybody may bring anywhere."""
        return [key_bytes(run_key(digest)) for digest in dict.fromkeys((*self._own, *self._runs))]

    def validate(self, record: DHTRecord) -> bool:
        reason = self._refusal_of_record(record)
        if reason is not None:
            log.debug("refused a value for the directory: %s", reason)
        return reason is None

    def _refusal_of_record(self, record: DHTRecord) -> str | None:
        read = _read(record)
        if isinstance(read, str):
            return read
        subkey, value = read
        if self.sender is None:
            return self.refusal(record.key, subkey, value, record.expiration_time)
        return self._refusal_of_brought(self.sender, record, subkey, value)

    def _refusal_of_brought(
        self, sender: str, record: DHTRecord, subkey: bytes | None, value: bytes
    ) -> str | None:
        """Why a value that a peer brings is refused, or None. The cheapest checks come first."""
        if subkey is None and _is_facts_of_another(value, sender):
            return "facts that somebody else brings"
        if subkey not in (None, base58.b58decode(sender)):
            return "a presence that somebody else brings"
        if not self._looks(sender, len(value)):
            return "too many values"
        try:
            reason = self._fault(record.key, subkey, value, record.expiration_time)
        except PeerFault as fault:  # a correct peer checks values before it passes them on
            self.door.blame(sender, VALUE_KIND)
            return fault.cause
        return reason or self._refusal_of_room(record, subkey, value)

    def _looks(self, sender: str, size: int) -> bool:
        """Whether the door lets the sender have one more signature checked."""
        if not self._is_tired:
            leave = self.door.enter(sender, VALUE_KIND, size)
            self._is_tired = isinstance(leave, str)
            if not isinstance(leave, str):
                leave()
        return not self._is_tired

    @staticmethod
    def refusal(key: bytes, subkey: bytes | None, value: bytes, expires_s: float) -> str | None:
        """Why a value is refused, or None."""
        try:
            return DirectoryValidator._fault(key, subkey, value, expires_s)
        except PeerFault as fault:
            return fault.cause

    @staticmethod
    def _fault(key: bytes, subkey: bytes | None, value: bytes, expires_s: float) -> str | None:
        """As `refusal`, but raises `PeerFault` for what no correct peer has signed."""
        signed = decode(value, Signed, VALUE_LIMIT_BYTES)
        if signed.kind == PRESENCE_KIND:
            return _refusal_of_presence(key, subkey, signed, expires_s)
        if signed.kind == FACTS_KIND:
            return _refusal_of_facts(key, subkey, signed, expires_s)
        if signed.kind == RUN_KIND:
            return _refusal_of_run(key, subkey, signed, expires_s)
        if signed.kind == SEALED_KIND:
            return _refusal_of_sealed(key, subkey, signed, expires_s)
        return f"unknown kind {one_line(signed.kind, 32)!r}"

    def _refusal_of_room(self, record: DHTRecord, subkey: bytes | None, value: bytes) -> str | None:
        now = get_dht_time()
        signed = decode(value, Signed, VALUE_LIMIT_BYTES)
        if signed.kind == FACTS_KIND:
            return self._refusal_of_room_for_facts(record, signed, len(value))
        if subkey is None:
            self._remember_run(digest_bytes(signed.payload), record.expiration_time)
            return None
        if signed.kind == SEALED_KIND:
            return self._refusal_of_slot(record, subkey, len(value), now)
        run_digest = open_presence(signed).run_digest
        is_own = run_digest in self._own
        if not self._knows(run_digest, now):
            return "a presence in a run that is not known here"
        return self._refusal_of_member(record, subkey, len(value), is_own, now)

    def _refusal_of_slot(
        self, record: DHTRecord, subkey: bytes, size: int, now: float
    ) -> str | None:
        """Why a sealed value is refused, or None. It needs no known run, so each peer may bring few
        at once."""
        held = {at: until for at, until in self._slots.get(subkey, {}).items() if until > now}
        if record.key not in held and len(held) >= SLOTS_LIMIT:
            return "its peer has brought other sealed values"
        reason = self._refusal_of_member(record, subkey, size, False, now)
        if reason is None:
            self._slots[subkey] = held | {record.key: record.expiration_time}
        return reason

    def _refusal_of_room_for_facts(
        self, record: DHTRecord, signed: Signed, size: int
    ) -> str | None:
        now, found = get_dht_time(), open_facts(signed).record
        if not self._knows(found.run_digest, now):
            return "facts of a run that is not known here"
        charged = 0 if found.run_digest in self._own else size + ENTRY_BYTES
        return self._facts.refusal(record.key, found.version, charged, record.expiration_time, now)

    def _knows(self, run_digest: str, now: float) -> bool:
        """Whether a run is known here. If not, other nodes are asked for it."""
        if run_digest in self._own or self._runs.get(run_digest, 0.0) >= now:
            return True
        self.on_unknown_run(run_digest)
        return False

    def _remember_run(self, run_digest: str, expires: float) -> None:
        self._runs[run_digest] = max(expires, self._runs.pop(run_digest, 0.0))
        if len(self._runs) > RUNS_LIMIT:
            others = (digest for digest in self._runs if digest not in self._own)
            oldest = next(others, run_digest)
            del self._runs[oldest]
            self.forget_run(key_bytes(run_key(oldest)))

    def _refusal_of_member(
        self, record: DHTRecord, subkey: bytes, size: int, is_own: bool, now: float
    ) -> str | None:
        """Bound the members of a shard. Otherwise one writer could make the shard unreadable for
        all."""
        size += ENTRY_BYTES
        members = self._members.setdefault(record.key, {})
        full = len(members) >= PEERS_PER_SHARD_LIMIT
        crowded = not is_own and self._stored_bytes + size > STORED_LIMIT_BYTES
        if subkey not in members and (full or crowded):
            self._forget_expired(now)
            members = self._members.setdefault(record.key, {})
            if len(members) >= PEERS_PER_SHARD_LIMIT:
                return "its shard is full"
            if not is_own and self._stored_bytes + size > STORED_LIMIT_BYTES:
                return "there is no room for further presences"
        before = members.get(subkey, (0.0, 0))
        charged = 0 if is_own else size
        members[subkey] = max(record.expiration_time, before[0]), charged
        self._stored_bytes += charged - before[1]
        return None

    def _forget_expired(self, now: float) -> None:
        kept = {
            key: {member: held for member, held in members.items() if held[0] > now}
            for key, members in self._members.items()
        }
        self._members = {key: members for key, members in kept.items() if members}
        self._slots = {
            peer: slots for peer, slots in self._slots.items() if max(slots.values()) > now
        }
        sizes = (size for members in self._members.values() for _, size in members.values())
        self._stored_bytes = sum(sizes)


def _read(record: DHTRecord) -> tuple[bytes | None, bytes] | str:
    """Subkey and value, or why there are none."""
    if len(record.value) > VALUE_LIMIT_BYTES + 8 or len(record.subkey or b"") > 64:
        return f"a value of {len(record.value)} bytes"
    try:
        value = FlatSerializer.loads(record.value)
        subkey = FlatSerializer.loads(record.subkey) if record.subkey else None
    except Exception as error:  # msgpack may raise anything for a stranger's bytes
        log.debug("undecodable value", exc_info=True)
        return f"undecodable bytes: {error!r}"
    if not isinstance(value, bytes) or not isinstance(subkey, bytes | None):
        return "a value that is not bytes"
    return subkey, value


def _refusal_of_time(expires_s: float, longest_s: float) -> str | None:
    left_s = expires_s - get_dht_time()
    if not -_SKEW_S < left_s < longest_s + _SKEW_S:
        return f"expires in {left_s:.0f} s, at most {longest_s:.0f}"
    return None


def _refusal_of_presence(
    key: bytes, subkey: bytes | None, signed: Signed, expires_s: float
) -> str | None:
    if not is_peer_id(signed.peer_id) or subkey != base58.b58decode(signed.peer_id):
        return "a presence under the name of another peer"
    presence = open_presence(signed)
    if key != key_bytes(presence_key(presence.run_digest, shard_of(presence.peer_id))):
        return "a presence under a key that is not its own"
    if expires_s != presence.expires_ms / 1000:
        return "a presence that expires at another time than its peer signed"
    return _refusal_of_time(expires_s, PRESENCE_TTL_LIMIT_S)


def _refusal_of_sealed(
    key: bytes, subkey: bytes | None, signed: Signed, expires_s: float
) -> str | None:
    if not is_peer_id(signed.peer_id) or subkey != base58.b58decode(signed.peer_id):
        return "a sealed value under the name of another peer"
    sealed = open_sealed(signed)
    if key != key_bytes(sealed_key(sealed.slot)):
        return "a sealed value under a key that is not its own"
    if expires_s != sealed.expires_ms / 1000:
        return "a sealed value that expires at another time than its peer signed"
    return _refusal_of_time(expires_s, PRESENCE_TTL_LIMIT_S)


def _is_facts_of_another(value: bytes, sender: str) -> bool:
    try:
        signed = decode(value, Signed, VALUE_LIMIT_BYTES)
    except PeerFault:
        return False  # the later checks refuse it
    return signed.kind == FACTS_KIND and signed.peer_id != sender


def _refusal_of_facts(
    key: bytes, subkey: bytes | None, signed: Signed, expires_s: float
) -> str | None:
    if subkey is not None:
        return "facts are not part of a dictionary"
    found = open_facts(signed)
    if key != key_bytes(facts_key(found.record.run_digest, signed.peer_id)):
        return "facts under a key that is not their own"
    if expires_s != found.expires_ms / 1000:
        return "facts that expire at another time than their peer signed"
    return _refusal_of_time(expires_s, PRESENCE_TTL_LIMIT_S)


def _refusal_of_run(
    key: bytes, subkey: bytes | None, signed: Signed, expires_s: float
) -> str | None:
    if subkey is not None:
        return "a run spec is not part of a dictionary"
    if key != key_bytes(run_key(digest_bytes(signed.payload))):
        return "a run spec under a name that is not its digest"
    spec = RunSpec.from_canonical_bytes(open_signed_bytes(signed, RUN_KIND))
    if spec.canonical_bytes() != signed.payload:
        return "a run spec that is not in its canonical form"
    return _refusal_of_time(expires_s, RUN_TTL_LIMIT_S)
