"""What a member publishes of itself: its record, and its part in the plan in force.

Each member has a key of its own. So one value stays below what the DHT carries, and the node that
brings it can be asked who it is. Anybody may read it; no view is agreed on from it.
"""

import msgspec

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import PeerRecord, open_record, run_of_record
from p2p_dtfm.core.protocol.signed import Sign, Signed, open_signed, sign, verifying_in
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.net.directory.values import HEXADECIMAL
from p2p_dtfm.net.errors import one_line

FACTS_KIND = "facts"
DIGEST_LIMIT = 64


class PublishedPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member does in the view in force. A spare has no layers."""

    view: int
    snapshot: str
    """The snapshot's digest. Members that name the same snapshot have the same plan."""
    pipeline: int
    stage: int
    first_layer: int
    end_layer: int
    microbatches: int
    step: int
    step_ns: int
    """The predicted step time."""


class PublishedFacts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Signed by the member, so that nobody else keeps it alive."""

    expires_ms: int
    record: Signed
    """The record, as in a request to join."""
    place: PublishedPart | None
    """The member's part in the plan; None where it is in no view."""


class Facts(msgspec.Struct, frozen=True):
    """The facts of a member, opened and checked."""

    record: PeerRecord
    place: PublishedPart | None
    expires_ms: int


def facts_key(run_digest: str, peer_id: str) -> str:
    return f"p2p-dtfm/1/facts/{run_digest}/{peer_id}"


def sign_facts(facts: PublishedFacts, signer: Sign) -> Signed:
    """The facts as their member publishes them."""
    return sign(facts.record.peer_id, FACTS_KIND, encode(facts), signer)


def open_facts(signed: Signed) -> Facts:
    """Check both signatures, owner and bounds. Raises `PeerFault`."""
    told = open_signed(signed, FACTS_KIND, PublishedFacts, verify)
    if told.record.peer_id != signed.peer_id:
        raise PeerFault(f"facts of {one_line(told.record.peer_id, 60)}", signed.peer_id)
    if not 0 <= told.expires_ms < 1 << 60:
        raise PeerFault("facts that expire in no time", signed.peer_id)
    if told.place is not None:
        _require_sane(told.place, signed.peer_id)
    run_digest = run_of_record(told.record)
    record = open_record(told.record, run_digest, verifying_in(run_digest, verify))
    return Facts(record, told.place, told.expires_ms)


def _require_sane(place: PublishedPart, peer_id: str) -> None:
    numbers = [getattr(place, name) for name in place.__struct_fields__ if name != "snapshot"]
    is_digest = len(place.snapshot) <= DIGEST_LIMIT and set(place.snapshot) <= HEXADECIMAL
    if not is_digest or any(not 0 <= number < 1 << 60 for number in numbers):
        raise PeerFault("facts with a place that cannot be", peer_id)
