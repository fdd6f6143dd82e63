"""What a peer says of its work: where it stands in a step, what it lacks, and from whom."""

from enum import StrEnum

import msgspec

from p2p_dtfm.core.protocol.snapshot import ViewId

LACKS_LIMIT = 8
"""Lacks that a peer says at most; more are not heard. Each single wait leads to the peer that holds
up all, and what arrives makes room for the next."""


class Kind(StrEnum):
    """What one peer may owe another in a step."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    PART = "part"
    SUM = "sum"
    RECEIPT = "receipt"
    CLAIM = "claim"
    AUDIT = "audit"
    PREPARED = "prepared"
    ACTIVE = "active"


class Lack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """Something that has not come, and the peer that owes it."""

    peer_id: str
    kind: Kind
    layer: int = 0
    index: int = 0


class Work(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a peer stands in a view's step."""

    view: ViewId
    step: int
    computes: bool = False
    """Whether the peer computes something, or is about to."""
    lacks: tuple[Lack, ...] = ()
    sends_to: tuple[str, ...] = ()
    """Peers that have not yet accepted what is on its way to them, or that fetch files here."""
    fetches: bool = False
    """Whether states or data for this step are on their way to the peer."""
