"""Who may say what: one row for each kind of thing that arrives from other peers.

A kind is the name of a control message's type, or of another way in: a lane, a blob, a probe. What
has no row is for members only. The rates of members are far above what a correct one needs: they
hold up a flood, never an honest peer.
"""

from enum import StrEnum
from typing import NamedTuple

import msgspec


class Role(StrEnum):
    """What a sender is to this peer now."""

    STRANGER = "stranger"
    NEWCOMER = "newcomer"
    """Has asked to join, or is named in the attempt under way."""
    CONTRIBUTOR = "contributor"
    """Must answer in the attempt under way."""
    MEMBER = "member"
    """Is in the view in force, or in the one that is agreed to follow it."""
    FORMER = "former"
    """Was a member of a view that this peer was in."""


class Rate(NamedTuple):
    """`per_s` again and again, `burst` at once."""

    per_s: int
    burst: int


KIB, MIB = 1 << 10, 1 << 20
MEMBERS = frozenset({Role.MEMBER})
NEAR = frozenset({Role.MEMBER, Role.CONTRIBUTOR, Role.FORMER})
KNOWN = NEAR | {Role.NEWCOMER}
EVERYBODY = frozenset(Role)
NEAR_RATE = Rate(2_000, 8_000)
"""The rate for each kind and each such sender."""
NEAR_OPENING_RATE = Rate(2_000, 32_768)
"""Takes a quarter of a processor's time or less. A view of 1,024 is agreed on with some ten
thousand signatures, from ten neighbours. A signature that was looked at once costs nothing the next
time."""
FAR = frozenset({Role.STRANGER, Role.NEWCOMER})
"""Strangers share one budget for each kind, and so do newcomers: a thousand keys gain nothing."""


class Row(msgspec.Struct, frozen=True):
    """Who may say something, how much of it, and how often."""

    roles: frozenset[Role]
    size_bytes: int = MIB
    sender: Rate = Rate(20, 100)
    """The rate of one stranger or newcomer."""
    together: Rate = Rate(200, 600)
    """The rate of all strangers together, and that of all newcomers together."""
    near: Rate = NEAR_RATE
    """The rate of one member, contributor or former member."""
    at_once: int = 16
    """How many are served at once for one stranger or newcomer; four times that for all of its
    class."""
    outside: frozenset[Role] | None = None
    """The roles that may while this peer is in no view, and so cannot know who is a member; None:
    `roles`."""
    stranger_bytes: int | None = None
    """What a stranger may send, where that is less."""
    is_paid_later: bool = False
    """The cost is known once it is done (`Gate.spend`): a sender that owes of it gets no more."""


STANDING_BYTES = 320 * KIB
"""Size of the Standing of a view of 1,024 members: the largest that any swarm says to strangers."""
_STRANGERS_GATHER = 64 * KIB
_AGREEMENT = Row(KNOWN, outside=EVERYBODY)
_FOLLOWING = Row(NEAR)
_CALM = Rate(1, 5)

TABLE: dict[str, Row] = {
    # control messages, by their type
    "Hello": Row(EVERYBODY, 8 * KIB, _CALM, Rate(40, 120)),
    "Knock": Row(EVERYBODY, KIB, _CALM, Rate(10, 40)),
    "JoinRequest": Row(EVERYBODY, 64 * KIB, Rate(2, 10), Rate(20, 60)),
    "Standing": Row(EVERYBODY, STANDING_BYTES, _CALM, Rate(10, 40), near=Rate(10, 80)),
    "Gather": _AGREEMENT,
    "Spread": _AGREEMENT,
    "Tidings": _AGREEMENT,
    "Ready": _AGREEMENT,
    "Synced": _AGREEMENT,
    "Active": _AGREEMENT,
    "Heartbeat": _AGREEMENT,
    "SignedPrepared": Row(NEAR, outside=EVERYBODY),
    "PreparedSteps": Row(NEAR, outside=EVERYBODY),
    "Claimed": Row(NEAR, outside=EVERYBODY),
    "Audited": Row(NEAR, KIB, outside=EVERYBODY),
    "ShownClaims": Row(MEMBERS, 256 * KIB, near=Rate(4, 32)),
    "FollowLayers": Row(MEMBERS),
    "ConfirmLayers": Row(MEMBERS),
    "StateDigest": _FOLLOWING,
    "CutBegun": _FOLLOWING,
    "CutReceipt": _FOLLOWING,
    "LayerOffered": _FOLLOWING,
    "LayersCommitted": _FOLLOWING,
    "LayerReceipt": _FOLLOWING,
    "FollowEnded": _FOLLOWING,
    "FollowDone": _FOLLOWING,
    "CheckpointFiles": Row(NEAR),
    "TraceRequest": Row(MEMBERS, KIB, near=Rate(20, 100)),
    "TranscriptRequest": Row(MEMBERS, KIB, near=Rate(4, 16)),
    # a Gather, or Spread, of somebody unknown that carries what a member has signed
    "Gather of a stranger": Row(
        EVERYBODY, _STRANGERS_GATHER, Rate(2, 6), Rate(10, 30), stranger_bytes=_STRANGERS_GATHER
    ),
    # what it costs to open what an agreement message passes on, beside the message itself: a unit
    # for each signature that is looked at, and in no view for each KiB (`Gate.spend`)
    "opening": Row(EVERYBODY, MIB, Rate(64, 1024), Rate(256, 2048), near=NEAR_OPENING_RATE),
    "opening in no view": Row(
        EVERYBODY, MIB, Rate(256, 8192), Rate(1024, 16384), near=NEAR_OPENING_RATE
    ),
    # of a run by invitation
    "Introduction": Row(EVERYBODY, 4 * KIB, Rate(1, 8), Rate(20, 60), near=Rate(2, 16)),
    "Revocations": Row(NEAR, 512 * KIB, near=Rate(2, 40)),
    # calls, before they are read
    "control": Row(
        EVERYBODY, MIB + 64, Rate(40, 160), Rate(400, 1200), stranger_bytes=STANDING_BYTES + 64
    ),
    "blob": Row(EVERYBODY, KIB, Rate(50, 200), Rate(200, 400), at_once=8),
    "echo": Row(EVERYBODY, KIB, Rate(5, 24), Rate(100, 300)),
    "directory": Row(EVERYBODY, MIB, Rate(10, 100), Rate(60, 600)),
    # each KiB of what is answered there: a peer that looks for a run of a thousand reads 600
    "directory answer": Row(EVERYBODY, MIB, Rate(32, 1024), Rate(512, 16384), is_paid_later=True),
    # each value that is to be stored there, and whose signature has to be looked at
    "directory value": Row(EVERYBODY, 8 * KIB, Rate(2, 16), Rate(60, 600), near=Rate(20, 200)),
    "whereabouts": Row(EVERYBODY, 2 * KIB + 64, Rate(2, 24), Rate(20, 100), at_once=4),
    "reachability": Row(EVERYBODY, KIB, Rate(1, 4), Rate(4, 16), near=Rate(1, 8), at_once=2),
    "punching": Row(EVERYBODY, KIB, Rate(1, 4), Rate(4, 16), near=Rate(1, 8), at_once=2),
    "public-status": Row(EVERYBODY, KIB, _CALM, Rate(4, 16), near=Rate(1, 8), at_once=2),
    "lines": Row(NEAR, 2 * KIB + 64, near=Rate(5, 100)),
    "call-lines": Row(NEAR, 2 * KIB + 64, near=Rate(5, 100)),
    # streams and direct lines, before a byte of them but the hello is read
    "lane forward": Row(NEAR, near=Rate(20, 400)),
    "lane backward": Row(NEAR, near=Rate(20, 400)),
    "lane reduce": Row(NEAR, near=Rate(20, 400)),
    "lane state": Row(NEAR, near=Rate(20, 400)),
    "bandwidth": Row(KNOWN, sender=Rate(1, 6), together=Rate(4, 48), near=Rate(1, 16), at_once=2),
    "relay": Row(EVERYBODY, sender=Rate(1, 16), together=Rate(20, 100), at_once=64),
    # files, by what they are
    "manifest": Row(KNOWN, KIB, Rate(100, 600), Rate(400, 2400)),
    "data": Row(MEMBERS, KIB),
    "weights": Row(MEMBERS, KIB),
}

MEMBERS_ONLY = Row(MEMBERS)
FILES = ("manifest", "data", "weights")
OPEN_FILES = Row(EVERYBODY, KIB, Rate(50, 200), Rate(200, 400))
"""In a run whose admission is open, whoever asks gets all files."""


FIRST_WORDS = ("control", "Introduction")
"""All that strangers may say in a run by invitation."""


def row_of(kind: str, is_open: bool, is_closed: bool = False) -> Row:
    """The row of a kind, in a run that is open to everybody, by invitation, or neither."""
    if is_open and kind in FILES:
        return OPEN_FILES
    row = TABLE.get(kind, MEMBERS_ONLY)
    return _for_guests(row) if is_closed and kind not in FIRST_WORDS else row


def _for_guests(row: Row) -> Row:
    strangers = frozenset({Role.STRANGER})
    outside = None if row.outside is None else row.outside - strangers
    return msgspec.structs.replace(row, roles=row.roles - strangers, outside=outside)
