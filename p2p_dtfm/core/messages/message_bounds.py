"""Bounds on what arrives: whatever a number, a name or a list could do, it does not get far."""

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
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import RECORD_LIMIT_BYTES
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId

NUMBER_LIMIT = 1 << 53
"""Steps, numbers of views, lives, rounds, versions, progress: nothing is ever so high."""
TEXT_LIMIT = 256
ITEMS_LIMIT = 1024
"""Members, contributors, absent peers, signatures."""
CHARGES_LIMIT = 4096
NEWCOMERS_LIMIT = 128
"""Records in one Gather: each member lets 32 wait, mostly the same ones."""
CERTIFICATES_LIMIT = 16
FAREWELLS_LIMIT = 4
MISSED_LIMIT = 16
"""Who hears nothing of more of its fellows is cut off itself, and asks nobody."""
COMMIT_LIMIT_BYTES = 16 * 1024
"""One Prepared in a Standing."""
CONTRIBUTION_LIMIT_BYTES = 512 * 1024
BARS_LIMIT = 128
ORIGINS_LIMIT = 8
GIVEN_LIMIT = 16
"""Those that the user of a peer has named."""
READY_SETS_LIMIT = 8
"""Most say the same: few things are said besides."""
VIEWS_LIMIT = 16
"""Of contributors, in one message."""
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
"""0 for all others."""
_SMALL = frozenset({Member, ViewId})
_LARGE = frozenset({Plan, Certificate, KnownView})


def require_bounded(message: AgreementMessage, sender: str) -> None:
    """Raises `PeerFault` for what no correct peer says, wherever it stands."""
    _walk(message, "", sender)
    if isinstance(message, Gather | Spread) and len(message.certificates) > CERTIFICATES_LIMIT:
        raise PeerFault("a Gather with too many certificates", sender)
    if isinstance(message, Standing):
        _require_sorted_signatures(message, sender)


def require_bounded_contribution(part: Contribution, layer_count: int) -> None:
    """As for messages; and it names no layers that there are not."""
    require_bounded_part(part, part.member.peer_id)
    require_layers(part, layer_count)


def require_bounded_part(part: msgspec.Struct, maker: str) -> None:
    """What it says is of a size and of numbers that can be."""
    _walk(part, "", maker)


def require_layers(part: Contribution, layer_count: int) -> None:
    """It names no layers that there are not."""
    named = [*part.held]
    for saved in (*part.saved, *part.cuts):
        named += saved.layers
    for step in (part.pending, part.retained):
        named += step.reduced_layers if step is not None else ()
    if any(layer >= layer_count for layer in named):
        peer_id = part.member.peer_id
        raise PeerFault("a contribution with layers that there are not", peer_id)


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
            if item and item is not True:  # or say nothing, which is within all bounds
                _walk(item, field, sender)


def _once(value: msgspec.Struct, sender: str, walk: Callable[[msgspec.Struct], None]) -> None:
    """For what many messages say alike, such as a plan by each who is in the view. What is refused
    is not remembered: it may be of any size."""
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
