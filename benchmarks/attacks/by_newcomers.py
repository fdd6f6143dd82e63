"""Attacks by peers that the swarm lets come near, or that only keep its doors busy: like
`by_strangers.py`."""

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import psutil

from benchmarks.attacks.by_strangers import Attack, Notes
from benchmarks.attacks.stranger import CALL_S, Stranger
from p2p_dtfm.core.messages.agreement_messages import (
    Contribution,
    Gather,
    Heartbeat,
    JoinRequest,
    Ready,
    sign_contribution,
)
from p2p_dtfm.core.messages.prepared import Prepared, SignedPrepared, sign_prepared
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.records import LayerTiming, Link, open_record, sign_record
from p2p_dtfm.core.protocol.signed import verifying_in
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.net.contacts.identity import verify
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS
from p2p_dtfm.net.streams.bulk import LANES

SYBILS = 8
CONNECTIONS = 200
DRIBBLE_S = 0.5


def _ports() -> list[int]:
    """At which the attacked daemons, this program's children, listen: libp2p and direct lines."""
    found = set()
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            listening = child.net_connections("tcp4")
            found |= {at.laddr.port for at in listening if at.status == psutil.CONN_LISTEN}
    return sorted(found)


async def slow_words(one: Stranger, seconds: float) -> Notes:
    """A byte now and then, on many connections to each port at which a daemon listens."""
    end_s = time.monotonic() + seconds
    writers: list[asyncio.StreamWriter] = []
    ports = _ports()
    start = (b"\x16\x03\x01\x40\x00", b"\x13/multistream/1.0.0", b"\xff\xff\xff\xff\x7f", b"GET ")
    for number in range(CONNECTIONS):
        for port in ports:
            with contextlib.suppress(OSError, TimeoutError):
                opening = asyncio.open_connection("127.0.0.1", port)
                _, writer = await asyncio.wait_for(opening, CALL_S)
                writer.write(start[number % len(start)])
                writers.append(writer)
    opened = len(writers)
    while time.monotonic() < end_s:
        writers = [writer for writer in writers if not writer.transport.is_closing()]
        for writer in writers:
            writer.write(b"\0")
        await asyncio.sleep(DRIBBLE_S)
    for writer in writers:
        writer.close()
    return {"connections": opened, "kept": len(writers), "ports": len(ports)}


async def long_words(one: Stranger, seconds: float) -> Notes:
    """Lengths that nothing has, before a few bytes, in streams of each lane and of calls."""
    names = [f"bulk/{lane}" for lane in sorted(LANES)]
    names += ["control", "blob", "blobs", "echo", "bandwidth", "whereabouts", "punching"]
    lengths = [struct.pack(">H", 0), struct.pack(">H", 0xFFFF), b"\xff" * 8, bytes(8)]
    lengths += [b"\x80" * 9 + b"\x01", b"\xff" * 9 + b"\x01", b"\x7f" + b"\xff" * 7]
    opened: list[Any] = []
    for name in names:
        for length in lengths:
            with contextlib.suppress(Unreachable, TimeoutError, *CONNECTION_ERRORS):
                stream = await one.host.open_stream(one.member, f"/p2p-dtfm/1/{name}", 2.0)
                opened.append(stream)
                stream[1].write(length + b"\xc1" * 50)
                await asyncio.wait_for(stream[1].drain(), CALL_S)
    await asyncio.sleep(seconds)
    for _, writer in opened:
        writer.close()
    return {"opened": len(opened)}


async def foretold(one: Stranger, seconds: float) -> Notes:
    """Prepared of steps to come, by one that is let near: signed, of the view, and too early."""
    view = ViewId(*one.view)
    said = refused = 0
    await one.ask_to_join()
    for step in (0, 10**3, 10**6, 2**53, 2**63 - 1):
        for count in (1, 2**62, -1):
            prepared = Prepared(
                view, step, one.host.peer_id, {0: 1.0}, 1.0, count, 0.0, 0, None, "", {}, {}, step
            )
            signed = sign_prepared(prepared, one.sign)
            for peer_id in one.peers:
                said += 1
                refused += bool(await one.say(SignedPrepared(signed), peer_id))
    return {"said": said, "refused": refused}


async def _live_nearby(
    one: Stranger,
    seconds: float,
    change: Mapping[str, Any] | None = None,
    repeats: bool = False,
) -> Notes:
    """It asks to be let in, answers as the honest do, even with their own Ready, and is never
    synced; then it asks again. With `repeats` it tells each member again all that others said."""
    seen: dict[tuple[int, bool], Any] = {}
    kept: list[tuple[str, Any]] = []
    record = _record(one, 1, change or {})
    asked = passed = agreed = sequence = 0
    refused = ""
    end_s = time.monotonic() + seconds
    again_s = 0.0
    while time.monotonic() < end_s:
        if time.monotonic() >= again_s:
            sequence += 1
            record = _record(one, sequence, change or {})
            refused = await one.say(JoinRequest(record, None, passed))
            await one.say_to_all(Heartbeat(one.me, sequence))
            again_s = time.monotonic() + 1.0
        heard, one.heard[:] = list(one.heard), []
        for sender, message in heard:
            kept = [*kept[-200:], (sender, message)]
            if isinstance(message, Gather):
                asked += 1
                key = (message.number, message.planned)
                if key not in seen:
                    mine = Contribution(one.me, message.number, record, None, 0, {}, ())
                    seen[key] = sign_contribution(mine, one.sign)
                known = {item.peer_id: item for item in (*message.contributions, seen[key])}
                answer = msgspec.structs.replace(
                    message,
                    sender=one.me,
                    contributions=tuple(known[name] for name in sorted(known)),
                )
                await one.say(answer, sender)
            elif isinstance(message, Ready):
                agreed += 1
                passed = max(passed, message.view.number)
                mine_too = msgspec.structs.replace(message, sender=one.me, signature=b"")
                await one.say_to_all(stated(mine_too, one.sign))
        if repeats:
            for sender, message in kept[-20:]:
                for peer_id in one.peers:
                    if peer_id != sender:
                        await one.say(message, peer_id)
        await asyncio.sleep(0.05)
    return {"asked": asked, "ready_heard": agreed, **({"last_refusal": refused} if refused else {})}


def _record(one: Stranger, sequence: int, change: Mapping[str, Any]) -> Any:
    is_signed = verifying_in(one.run_digest, verify)
    honest = open_record(one.record_of(one.host.identity, one.addresses), one.run_digest, is_signed)
    device = msgspec.structs.replace(honest.device, **change.get("device", {}))
    other = {name: value for name, value in change.items() if name != "device"}
    record = msgspec.structs.replace(honest, sequence=sequence, device=device, **other)
    return sign_record(record, one.sign)


async def unsynced(one: Stranger, seconds: float) -> Notes:
    """Agreed on with a Ready as the others', never synced, and it asks again and again."""
    return await _live_nearby(one, max(seconds, 30))


async def repeats(one: Stranger, seconds: float) -> Notes:
    """A newcomer tells everybody again, in its own connection, what members have said before."""
    return await _live_nearby(one, max(seconds, 20), repeats=True)


async def many_keys(one: Stranger, seconds: float) -> Notes:
    """Eight newcomers of one maker, each well below every limit, that are never synced."""
    others = []
    for number in range(SYBILS - 1):
        place = one.folder / f"sybil-{number}"
        place.mkdir()
        others.append(await Stranger.start(place, one.first_address, one.view))
    try:
        told = await asyncio.gather(
            *(_live_nearby(each, max(seconds, 30)) for each in (one, *others))
        )
    finally:
        for each in others:
            await each.host.close()
    return {"asked": sum(note["asked"] for note in told), "keys": SYBILS}


def _hostile(what: str, change: Mapping[str, Any]) -> Attack:
    async def attack(one: Stranger, seconds: float) -> Notes:
        return await _live_nearby(one, max(seconds, 12), change)

    attack.__doc__ = f"A newcomer's record with {what}."
    return attack


_SCREEN = "\x1b[2J\x1b]0;x\x07<script>"
_NOTHING, _AGES = LayerTiming(0, 0), LayerTiming(2**59, 2**59)
_RECORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("text that would rule the reader's screen", {"device": {"name": _SCREEN}}),
    "kind": ("a device of such a kind", {"device": {"kind": _SCREEN}}),
    "instant": (
        "a device that takes no time and has all memory",
        {
            "device": {
                "embedding": _NOTHING,
                "block": _NOTHING,
                "head": _NOTHING,
                "memory_bytes": 2**59,
            },
            "uplink_bytes_per_s": 2**59,
        },
    ),
    "ages": (
        "a device that takes years, and has no memory",
        {"device": {"embedding": _AGES, "block": _AGES, "head": _AGES, "memory_bytes": 0}},
    ),
    "addresses": (
        "addresses of nobody: names, this machine, none",
        {
            "addresses": (
                "/ip4/127.0.0.1/tcp/9", "/dns4/localhost/tcp/22/p2p/x", "/ip6/fe80::1/tcp/1",
                "/ip4/169.254.169.254/tcp/80", "", "\x1b[2J", "/unix/etc/passwd",
            )
        },
    ),
    "links": (
        "links to nobody, of no length",
        {"links": {f"nobody-{number}": Link(0, 2**59) for number in range(200)}},
    ),
}  # fmt: skip

BY_NEWCOMERS: dict[str, Attack] = {
    "slow-words": slow_words,
    "long-words": long_words,
    "foretold": foretold,
    "unsynced": unsynced,
    "repeats": repeats,
    "many-keys": many_keys,
    **{f"record-{name}": _hostile(*told) for name, told in _RECORDS.items()},
}
"""By the name that the command takes."""
