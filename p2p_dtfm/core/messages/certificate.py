"""The Ready set of a view, under the signatures of the peers that said Ready."""

import msgspec

from p2p_dtfm.core.protocol.snapshot import Member, ViewId


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Ready set of a view: proof that its contributors have agreed on it and its members."""

    view: ViewId
    plan_digest: str
    members: tuple[Member, ...]
    ready: tuple[tuple[Member, bytes], ...]
    """Each contributor with the signature of its Ready."""
