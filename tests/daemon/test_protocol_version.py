"""Daemons that speak alike plan alike: what they say and how they plan belongs to a version.

Where one of these tests fails, members of the last release and of this one would not understand
each other, or would stop because they planned the same snapshot unlike. If the change is meant:
raise `PROTOCOL_VERSION`, once for each release, and write down here what it says and plans.
"""

from typing import Any

import msgspec

from p2p_dtfm.core.messages.agreement_messages import Contribution
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION, Link, PackedRecord
from p2p_dtfm.core.protocol.signed import covered, signing_in
from p2p_dtfm.core.protocol.snapshot import HeldLayer, Snapshot
from p2p_dtfm.daemon.peers.wire import KnownPeers, Message, TraceReply, TranscriptPiece, Welcome
from p2p_dtfm.net.streams.frames import FrameHeader
from tests.core.planning import Peer, name_of, snapshot

SAID = {2: "48d8b2575a1133b5d1cd140845024e79ba77d461d715da0c3730b2ef6d800649"}
PLANNED = {2: "dcc0e2b771dae12942f10b0649e9430699f8e0a8ab99b11ebc79ede3f55bd66f"}
COVERED = {2: "a4262e9dd0958f6caab747f25ef8ac5582c32a6ce176b105c45173e334ca2495"}


NO_WORDS = ("description", "maxProperties")


def without_words(schema: Any) -> Any:
    """Names and kinds of fields, without their descriptions and largest numbers of properties."""
    if isinstance(schema, dict):
        return {k: without_words(v) for k, v in sorted(schema.items()) if k not in NO_WORDS}
    if isinstance(schema, list):
        return [without_words(item) for item in schema]
    return schema


def test_what_daemons_say() -> None:
    kinds = (Message, Contribution, Prepared, PackedRecord, Snapshot, Plan | NoPlan, FrameHeader)
    answers = (KnownPeers, TraceReply, TranscriptPiece, Welcome)
    found = msgspec.json.schema_components([*kinds, *answers])
    said = digest_bytes(msgspec.json.encode(without_words(list(found)), order="sorted"))
    assert said == SAID[PROTOCOL_VERSION]


def test_what_signatures_cover() -> None:
    """A daemon that expects another text finds that nobody has signed anything."""
    text = signing_in("a run", lambda payload: payload)(covered("a peer", "ready", b"said"))
    assert digest_bytes(text) == COVERED[PROTOCOL_VERSION]


def snapshots() -> list[Snapshot]:
    alike = snapshot([Peer()] * 7)
    far = Link(round_trip_ns=100_000_000, bytes_per_s=20_000_000)
    apart = {(a, b): far for a in range(6) for b in range(6) if (a < 3) != (b < 3)}
    mixed = [Peer(block_ns=ns * 1_000_000) for ns in (1, 1, 4, 4, 9, 30)]
    homes = [Peer(uplink_bytes_per_s=rate * 125_000) for rate in (20, 50, 100, 1000)]
    small = [Peer(memory_bytes=size << 20) for size in (100, 150, 200, 300, 80)]
    plan = compute_plan(alike)
    assert isinstance(plan, Plan)
    held = tuple(
        HeldLayer(name_of(n), layer, 5) for n in range(1, 7) for layer in plan.layers_of(name_of(n))
    )
    failed = msgspec.structs.replace(
        alike, records=alike.records[1:], present=plan, planned=False, step=5, held=held
    )
    return [
        snapshot([Peer()]),
        alike,
        failed,
        snapshot(mixed, links=apart),
        snapshot(homes),
        snapshot(small),
    ]


def test_what_daemons_plan() -> None:
    digests = [compute_plan(each).digest() for each in snapshots()]
    assert digest_bytes(" ".join(digests).encode()) == PLANNED[PROTOCOL_VERSION]
