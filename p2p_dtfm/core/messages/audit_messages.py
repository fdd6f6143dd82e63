"""What stage-holders of an audited run say of their work, before and in Prepared."""

import msgspec

from p2p_dtfm.core.protocol.snapshot import ViewId


class Claimed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="claimed"):
    """The sender's work of a step is done, and what it was is said here, before anybody knows
    whose work will be computed again."""

    view: ViewId
    step: int
    arithmetic: str
    """What has the same name computes the same bits; empty: nobody's are known to be these."""
    threads: int
    """By which they were computed; sums within a kernel depend on it."""
    work: bytes
    """`core.audit.work.work_digest` of it."""
    parts: dict[int, tuple[bytes, ...]]
    """By the first layer of each segment with other holders: of this peer's own gradient, a digest
    for each chunk. Under it the bytes can be fetched while the step is open."""
    opening: bytes
    """What the claim of the step before was committed to, in this view."""
    commitment: bytes
    """The digest of the next opening."""


class Audited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="audited"):
    """The sender was drawn to compute a stage-holder's work of a step again."""

    view: ViewId
    step: int
    peer_id: str
    """Whose work."""
    work: bytes
    """What the sender comes to."""


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """In a signed Prepared: what its maker has computed, and what it has found of others."""

    arithmetic: str
    parts: dict[int, tuple[bytes, ...]]
    """By segment, of this peer's own gradient, a digest for each holder: of what it sums. A segment
    with one holder has one."""
    got: dict[int, tuple[bytes, ...]]
    """By segment with other holders: of the gradients that came from each of them; empty for the
    maker itself, and where it sums nothing."""
    found: dict[str, bytes]
    """What the works of others, that were drawn or disputed, came to here."""
