"""Bounds on numbers, names and lists in what arrives, so that none of them can do harm."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Contribution,
    Gather,
    KnownView,
    Spread,
    Standing,
)
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.prepared import ACCOUNT_LIMIT_BYTES
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan, flaw_of
from p2p_dtfm.core.protocol.records import RECORD_LIMIT_BYTES
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.protocol.workload import Workload

NUMBER_LIMIT = 1 << 53
"""No step, number of a view, life, round, version or progress is ever so high."""
TEXT_LIMIT = 256
ITEMS_LIMIT = 1024
"""Members, contributors, absent peers, signatures."""
CHARGES_LIMIT = 4096
NEWCOMERS_LIMIT = 128
"""Records in one Gather. Each member lets 32 newcomers wait, mostly the same ones as others."""
CERTIFICATES_LIMIT = 16
FAREWELLS_LIMIT = 4
MISSED_LIMIT = 16
"""Fellows that a heartbeat says are not heard. A peer that misses more is cut off itself."""
COMMIT_LIMIT_BYTES = 16 * 1024
"""One Prepared in a Standing."""
CONTRIBUTION_LIMIT_BYTES = 512 * 1024
BARS_LIMIT = 128
ORIGINS_LIMIT = 8
GIVEN_LIMIT = 16
"""Peers that the user of a peer has told it to follow."""
READY_SETS_LIMIT = 8
"""Different things said in one message: most members say the same."""
VIEWS_LIMIT = 16
"""Views of contributors in one message."""
_LENGTHS = {
    "accusations": CHARGES_LIMIT,
    "newcomers": NEWCOMERS_LIMIT,
    "ancestors": 160,
    "origins": ORIGINS_LIMIT,
    "follows": GIVEN_LIMIT,
    "farewells": FAREWELLS_LIMIT,
    "gives": NEWCOMERS_LIMIT,
    "bars": BARS_LIMIT,
    "missed": MISSED_LIMIT,
    "ready_sets": READY_SETS_LIMIT,
    "active": READY_SETS_LIMIT,
    "views": VIEWS_LIMIT,
    "plans": VIEWS_LIMIT,
}
_BYTES = dict.fromkeys(("newcomers", "record", "records"), RECORD_LIMIT_BYTES)
_BYTES |= {"prepared": ACCOUNT_LIMIT_BYTES, "commit": ACCOUNT_LIMIT_BYTES}
_SIGNATURE_LIMIT_BYTES = 128
_LEAST = {"kept": -1}
"""The least value of a field; 0 for all other fields."""
_SMALL = frozenset({Member, ViewId})
_LARGE = frozenset({Plan, Certificate, KnownView})


def require_bounded(message: AgreementMessage, sender: str) -> None:
    """Raises `PeerFault` for what no correct peer says, wherever it stands."""
    _walk(message, "", sender)
    if isinstance(message, Gather | Spread) and len(message.certificates) > CERTIFICATES_LIMIT:
        raise PeerFault("a Gather with too many certificates", sender)
    if isinstance(message, Standing):
        _require_sorted_signatures(message, sender)


def require_bounded_part(part: msgspec.Struct, maker: str) -> None:
    """Raises `PeerFault` if a part's sizes or numbers are beyond the bounds."""
    _walk(part, "", maker)


def require_of_run(part: Contribution, workload: Workload) -> None:
    """Raises `PeerFault` for a contribution with layers that do not exist, or with a plan that no
    member of the run can have agreed on.

    Whoever goes through a plan of 2^53 layers, or of no pipeline, stands still or errs. And a peer
    in no view believes a view that its only member has signed, whatever its plan is."""
    peer_id, present = part.member.peer_id, part.present
    named = [*part.held]
    for saved in (*part.saved, *part.cuts):
        named += saved.layers
    for step in (part.pending, part.retained):
        named += step.reduced_layers if step is not None else ()
    if any(layer >= workload.layer_count for layer in named):
        raise PeerFault("a contribution with layers that there are not", peer_id)
    if present is None or present.plan is None:
        return
    try:
        _require_sound(present.plan, workload.layer_count, workload.microbatch_count)
    except PeerFault as fault:
        raise PeerFault(fault.cause, peer_id) from fault


@lru_cache(maxsize=32)
def _require_sound(plan: Plan, layer_count: int, microbatch_count: int) -> None:
    """Looks once at a plan that each member tells. A refused one is not remembered."""
    if (flaw := flaw_of(plan, layer_count, microbatch_count)) is not None:
        raise PeerFault(f"a contribution with a plan that there cannot be: {flaw}", "")


def _require_sorted_signatures(message: Standing, sender: str) -> None:
    for certificate in (message.certificate, *message.farewells):
        names = [member.peer_id for member, _ in certificate.ready]
        if len(set(names)) < len(names):
            raise PeerFault("a certificate in which a peer signs twice", sender)


def _walk(value: Any, name: str, sender: str) -> None:
    kind = type(value)
    if kind is int:
        if not _LEAST.get(name, 0) <= value < NUMBER_LIMIT:
            raise PeerFault(f"a number in {name!r} that cannot be: below 0 or above 2^53", sender)
    elif kind is str:
        if len(value) > TEXT_LIMIT:
            raise PeerFault(f"a text of {len(value)} characters in {name!r}", sender)
    elif kind in _WALKS:
        _WALKS[kind](value, name, sender)
    elif kind in _SMALL:
        _once(value, sender, _walk_small)
    elif kind in _LARGE:
        _once(value, sender, _walk_large)
    else:
        _walk_fields(value, sender)


def _require_signature(value: bytes, name: str, sender: str) -> None:
    if len(value) > _SIGNATURE_LIMIT_BYTES:
        raise PeerFault(f"a signature of {len(value)} bytes", sender)


def _walk_signed(value: Signed, name: str, sender: str) -> None:
    is_long = len(value.payload) > _payload_limit(name)
    if is_long or len(value.signature) > _SIGNATURE_LIMIT_BYTES:
        raise PeerFault(f"a statement of {len(value.payload)} bytes in {name!r}", sender)
    _walk(value.peer_id, "peer_id", sender)


def _walk_tuple(value: tuple[Any, ...], name: str, sender: str) -> None:
    _require_length(value, name, sender)
    for item in value:
        _walk(item, name, sender)


def _walk_dict(value: dict[Any, Any], name: str, sender: str) -> None:
    _require_length(value, name, sender)
    for key, item in value.items():
        _walk(key, name, sender)
        _walk(item, name, sender)


_WALKS: dict[type, Callable[[Any, str, str], None]] = {
    bytes: _require_signature,
    Signed: _walk_signed,
    tuple: _walk_tuple,
    dict: _walk_dict,
}


def _walk_fields(value: Any, sender: str) -> None:
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            item = getattr(value, field)
            kind = type(item)
            if kind is int and 0 <= item < NUMBER_LIMIT:  # most are; so it is looked at here
                continue
            if item and item is not True:  # empty values are within all bounds
                _walk(item, field, sender)


def _once(value: msgspec.Struct, sender: str, walk: Callable[[msgspec.Struct], None]) -> None:
    """Checks, once, a value that many messages share, such as a plan that each member tells. A
    refused value is not remembered: it may be of any size."""
    try:
        walk(value)
    except PeerFault as fault:
        raise PeerFault(fault.cause, sender) from fault


@lru_cache(maxsize=2048)
def _walk_small(value: msgspec.Struct) -> None:
    _walk_fields(value, "")


@lru_cache(maxsize=32)
def _walk_large(value: msgspec.Struct) -> None:
    _walk_fields(value, "")


def _require_length(value: Any, name: str, sender: str) -> None:
    if len(value) > _LENGTHS.get(name, ITEMS_LIMIT):
        raise PeerFault(f"{len(value)} items in {name!r}", sender)


def _payload_limit(name: str) -> int:
    if name == "contributions":
        return CONTRIBUTION_LIMIT_BYTES
    return _BYTES.get(name, COMMIT_LIMIT_BYTES)
