"""What a peer says of its work: where it stands in a step, what it lacks, and of whom."""

from enum import StrEnum

import msgspec

from p2p_dtfm.core.protocol.snapshot import ViewId

LACKS_LIMIT = 8
"""Said at most; what is beyond is not heard. Each wait leads to who holds up all, and what comes
makes room for the next."""


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
    """Something that has not come, of the peer that owes it."""

    peer_id: str
    kind: Kind
    layer: int = 0
    index: int = 0


class Work(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a peer stands in a view's step."""

    view: ViewId
    step: int
    computes: bool = False
    """Something is computed, or is about to be."""
    lacks: tuple[Lack, ...] = ()
    sends_to: tuple[str, ...] = ()
    """What is on its way to these has not been accepted yet, or they fetch files here."""
    fetches: bool = False
    """States or data for this step are on their way here."""
