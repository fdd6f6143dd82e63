"""What daemons say to one another in control calls, and how it is read."""

from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import msgspec

from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    Gather,
    Heartbeat,
    JoinRequest,
    Ready,
    Spread,
    Standing,
    Synced,
    Tidings,
)
from p2p_dtfm.core.messages.audit_messages import Audited, Claimed, ShownClaims
from p2p_dtfm.core.messages.on_the_wire import Unreadable, compressed, expanded, tag_of
from p2p_dtfm.core.messages.prepared import PreparedSteps, SignedPrepared
from p2p_dtfm.core.messages.room import fitting
from p2p_dtfm.core.protocol.canonical import Numbered, decode, digest_bytes, encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.net.contacts.addresses import ways_to
from p2p_dtfm.net.libp2p.control import BODY_LIMIT_BYTES
from p2p_dtfm.web.state import Span


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """Who is there, and which run is trained here? A newcomer sends it to any peer."""

    protocol_version: int
    addresses: tuple[str, ...]


class Knock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="knock"):
    """The sender wants to take part in the run, and is going to ask for what it needs to join."""

    run_digest: str


class Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="introduction"):
    """The invitation by which the sender comes to a run, said before anything else. Empty if the
    sender founded it."""

    chain: tuple[Signed, ...]


class Revocations(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="revocations"):
    """Invitations that were taken back, each signed by a peer that may do so. A member that is new
    in a view also hears by which invitations others have come. Some of those may have been away
    since before it came."""

    signed: tuple[Signed, ...]
    chains: tuple[tuple[Signed, ...], ...] = ()


class PeerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    peer_id: str
    addresses: tuple[str, ...]


ADDRESSES_LIMIT_BYTES = 512 * 1024
"""Limit for the addresses of all members, in one answer."""


def with_room(
    named: Iterable[tuple[str, Sequence[str]]], limit_bytes: int = ADDRESSES_LIMIT_BYTES
) -> tuple[PeerAddress, ...]:
    """Peers, and where they say that they are, as far as that fits into an answer. Those with the
    shortest addresses have room first. Of the others only the id is told."""
    told = [PeerAddress(peer_id, ways_to(peer_id, at)) for peer_id, at in named]
    fits = fitting([sum(map(len, peer.addresses)) for peer in told], limit_bytes)
    pairs = zip(told, fits, strict=True)
    return tuple(peer if fit else PeerAddress(peer.peer_id, ()) for peer, fit in pairs)


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to Hello: the run as its founder signed it, and which peers to talk to."""

    protocol_version: int
    run_spec: Signed
    peers: tuple[PeerAddress, ...]
    step: int
    members: int = 0
    tokens_per_s: int = 0
    """What the members do together now, as measured; 0: not known. Only for the newcomer's user."""
    lets_in: bool = True
    """Whether the sender is a member, or makes the first view. Otherwise it asks to be let in
    itself."""
    standing: Standing | None = None
    """What shows that a complete run is complete."""
    name: str = ""
    """What the sender's owner calls it; empty: as its identity makes it."""


class AnyWelcome(msgspec.Struct, frozen=True):
    """What can be read of a Welcome of any version, whatever else is in it."""

    protocol_version: int


class AnySigned(msgspec.Struct, frozen=True, array_like=True):
    """The part of `Signed` that holds what is stated."""

    peer_id: str
    kind: str
    payload: bytes


class AnyWelcomeToRun(msgspec.Struct, frozen=True):
    """What most versions say of the run. The form in which the run is described may differ."""

    run_spec: AnySigned


def protocol_of(welcome: bytes) -> int:
    """The protocol that a Welcome's sender speaks. The rest of another version's Welcome may have
    another form. Raises `PeerFault`."""
    return decode(welcome, AnyWelcome).protocol_version


def run_of(welcome: bytes) -> str:
    """The digest of the run in a Welcome of any version; empty where it does not say."""
    try:
        return digest_bytes(decode(welcome, AnyWelcomeToRun).run_spec.payload)
    except PeerFault:
        return ""


class KnownPeers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a newcomer's request: peers that it will meet, and to which it should measure
    its links."""

    peers: tuple[PeerAddress, ...]
    """Members."""
    waiting: tuple["WaitingPeer", ...] = ()
    """Other newcomers that ask to join as well."""
    lets_in: bool = True
    standing: Standing | None = None
    """`lets_in` and `standing` are as in `Welcome`."""
    barred: "Barred | None" = None
    """Set if the sender of the request has no place."""


class Barred(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tells a peer convicted of false work that it has no place before `until_step`. The run is at
    `step`."""

    until_step: int
    step: int
    reason: str


class WaitingPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a newcomer says of itself, and where its connection to the sender comes from."""

    peer_id: str
    addresses: tuple[str, ...]
    seen_host: str


class FollowLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="follow"):
    """The sender wants these layers, for its place in an agreed view or as a guardian: first the
    state, then every gradient.

    `layers` gives the version that it has of each, -1 for none. `number` grows with each request,
    and names it in the answers. `from_takeover`: the state in which the view starts or goes on, not
    that of the view before.
    """

    view: ViewId
    number: int
    layers: Numbered[int]
    from_takeover: bool


class LayerOffered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="layer_offered"):
    """The state of a layer at a version, to be fetched as a blob; "" if the follower has it."""

    view: ViewId
    number: int
    layer: int
    version: int
    blob: str
    size_bytes: int


class ConfirmLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="confirm"):
    """The sender gets these layers from another peer. What are their states at the receiver, in the
    steps that begin next?"""

    view: ViewId
    number: int
    layers: tuple[int, ...]


class StateDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state_digest"):
    """The answer to ConfirmLayers, of one layer at one version."""

    view: ViewId
    number: int
    layer: int
    version: int
    digest: bytes


class LayersCommitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="committed"):
    """A step is committed whose gradients were sent to followers."""

    view: ViewId
    number: int
    step: int
    gradient_norm: float


class LayerReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="receipt"):
    """A guardian has the state of these layers at `step` and the reduced gradients of `step`."""

    view: ViewId
    step: int
    layers: tuple[int, ...]


class CutBegun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cut_begun"):
    """Copies of layers as of `step` are on their way; the lineage is that of their states."""

    view: ViewId
    step: int
    lineage: str


class CutReceipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cut_receipt"):
    """A guardian that lags has a copy of a layer as of `step`, with this digest."""

    view: ViewId
    step: int
    layer: int
    digest: str


class FollowEnded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="follow_ended"):
    """The sender can no longer feed this follower, which must ask again."""

    view: ViewId
    number: int
    reason: str


class FollowDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="follow_done"):
    """The follower has what it wanted with its request `number`."""

    view: ViewId
    number: int


class CheckpointFiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="checkpoint"):
    """Layer files of a checkpoint that the sender has on disk and serves as blobs."""

    step: int
    lineage: str
    files: Numbered[tuple[str, int]]
    """By layer: digest and size."""


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="trace"):
    """What did the receiver do in these steps? Without a first one: in the newest `count`."""

    first_step: int | None
    count: int


class TracedStep(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Spans by the sender's wall clock, in nanoseconds since 1970."""

    step: int
    spans: tuple[Span, ...]


class TraceReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to TraceRequest: the steps that the sender still remembers."""

    steps: tuple[TracedStep, ...]


class TranscriptRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="transcript"):
    """What is in the receiver's transcript of the run from this offset on?"""

    from_byte: int


class TranscriptPiece(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to TranscriptRequest. `total_bytes`: size of the whole transcript by now; 0 where
    none is kept."""

    total_bytes: int
    content: bytes


Message = (
    Hello
    | Knock
    | Introduction
    | Revocations
    | Gather
    | Spread
    | Tidings
    | Ready
    | Synced
    | Active
    | Standing
    | Heartbeat
    | JoinRequest
    | SignedPrepared
    | PreparedSteps
    | Claimed
    | Audited
    | ShownClaims
    | FollowLayers
    | LayerOffered
    | ConfirmLayers
    | StateDigest
    | LayersCommitted
    | LayerReceipt
    | CutBegun
    | CutReceipt
    | FollowEnded
    | FollowDone
    | CheckpointFiles
    | TraceRequest
    | TranscriptRequest
)

AGREEMENT = (Gather, Spread, Tidings, Ready, Synced, Active, Standing, Heartbeat, JoinRequest)


class _Body(msgspec.Struct, frozen=True, array_like=True):
    life: int
    message: Message


def pack(life: int, message: Message) -> bytes:
    """A message as this peer says it in one of its lives."""
    payload = encode_for_wire(_Body(life, message))
    assert len(payload) <= BODY_LIMIT_BYTES, f"a {type(message).__name__} of {len(payload)} bytes"
    return compressed(message, payload)


_KINDS = {kind.__struct_config__.tag: kind.__name__ for kind in get_args(Message)}
MayBeRead = Callable[[str, int], None]
"""Raises `PeerFault` where nothing of this kind and size is to be read now."""


def unpack(
    body: bytes, may_be_read: MayBeRead = lambda kind, size_bytes: None
) -> tuple[int, Message, int]:
    """(life of the sender, message, bytes that were read for it). `may_be_read` is asked before
    anything else is done, and again once the message's length is known. Raises `Unreadable`."""
    kind = _KINDS.get(tag_of(body))
    if kind is None:
        raise Unreadable("a message of an unknown kind")
    may_be_read(kind, len(body))
    payload = expanded(body)
    if len(payload) > len(body):
        may_be_read(kind, len(payload))
    try:
        opened = decode(payload, _Body)
    except PeerFault as fault:
        raise Unreadable(fault.cause) from fault
    return opened.life, opened.message, len(payload)
