"""A swarm as an onlooker sees it: what its members publish in the directory.

An onlooker takes no part. It has an identity for the occasion, asks, and serves nobody.
"""

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from p2p_dtfm.core.cost_model.links.swarm_links import Source, SwarmLinks
from p2p_dtfm.core.protocol.canonical import decode, digest_bytes
from p2p_dtfm.core.protocol.errors import UNREACHABLE, PeerFault, UserError
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION, PeerRecord
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.peers.wire import Hello, Welcome, pack
from p2p_dtfm.net.contacts.addresses import parse_address
from p2p_dtfm.net.directory.directory import Directory, open_run
from p2p_dtfm.net.directory.facts import Facts, PublishedPart
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host

ASK_DEADLINE_S = 10.0
LISTENS = ("/ip4/0.0.0.0/tcp/0",)
MEMBERS_LIMIT = 1024
"""As many as a swarm may have. Any peer that answers for the directory may invent any number."""


@dataclass(frozen=True)
class Onlooker:
    """A peer that is connected and takes no part."""

    host: Host
    control: ControlPlane
    directory: Directory


@dataclass(frozen=True)
class SwarmSeen:
    """`present` are all members that say so. `facts`, by peer id, are of those that publish any."""

    spec: RunSpec
    run_digest: str
    present: tuple[Presence, ...]
    facts: dict[str, Facts]

    @property
    def records(self) -> tuple[PeerRecord, ...]:
        """The members' records, sorted by peer id."""
        return tuple(self.facts[peer_id].record for peer_id in sorted(self.facts))

    @property
    def places(self) -> dict[str, PublishedPart]:
        """Places of members that say that they are in a view. A place with layers that the run has
        not is left out: it may be a stranger's, and its numbers anything."""
        places = {it: facts.place for it, facts in self.facts.items() if facts.place is not None}
        most = self.spec.model.layer_count
        return {it: p for it, p in places.items() if p.first_layer <= p.end_layer <= most}

    def layers_of(self, peer_id: str) -> list[int]:
        """The layers that a peer says it holds."""
        place = self.places.get(peer_id)
        return [] if place is None else list(range(place.first_layer, place.end_layer))


@contextlib.asynccontextmanager
async def looking_on(initial_peers: Sequence[str]) -> AsyncIterator[Onlooker]:
    """An onlooker connected to these addresses. Raises `UserError`."""
    async with contextlib.AsyncExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="p2p-dtfm-look-"))
        host = await Host.start(Path(scratch) / "identity.key", LISTENS, (), initial_peers)
        stack.push_async_callback(host.close)
        yield await stack.enter_async_context(looking_from(host, initial_peers))


@contextlib.asynccontextmanager
async def looking_from(host: Host, initial_peers: Sequence[str]) -> AsyncIterator[Onlooker]:
    """An onlooker over a host that is connected to these peers. Raises `UserError`."""
    async with contextlib.AsyncExitStack() as stack:
        control = ControlPlane(host, _refuse, name="control")  # it only asks; others may serve
        directory = await Directory.start(host, initial_peers, serves=False)
        stack.push_async_callback(directory.close)
        yield Onlooker(host, control, directory)


async def see(onlooker: Onlooker, initial_peers: Sequence[str], run_digest: str = "") -> SwarmSeen:
    """What the members of a run publish. Without a digest, of the run that the first of these peers
    says it trains. Raises `UserError`."""
    asked = [parse_address(address)[0] for address in initial_peers]
    directory = onlooker.directory
    try:
        if run_digest:
            payload = await _payload_of(directory, run_digest)
        else:
            payload = await _told_by(onlooker.control, asked)
        run_digest, spec = digest_bytes(payload), RunSpec.from_canonical_bytes(payload)
        present = {it.peer_id: it for it in await directory.present_peers(run_digest)}
        for presence in await directory.present_at(asked, run_digest):
            present[presence.peer_id] = presence
        members = sorted(present)[:MEMBERS_LIMIT]
        facts = await directory.facts_of(run_digest, members)
    except Unreachable as error:
        raise UserError(
            f"the directory does not answer: {error.cause}", "try again", exit_code=UNREACHABLE
        ) from error
    return SwarmSeen(spec, run_digest, tuple(present[it] for it in members), facts)


async def _payload_of(directory: Directory, run_digest: str) -> bytes:
    """The run spec with this digest. Raises `UserError` and `Unreachable`."""
    signed = await directory.fetch_run(run_digest)
    if signed is None:
        raise UserError(
            f"the directory knows no run {run_digest[:16]}",
            "see that the digest is whole and that somebody trains the run now",
            exit_code=UNREACHABLE,
        )
    return open_run(signed, run_digest)


async def _told_by(control: ControlPlane, peer_ids: Sequence[str]) -> bytes:
    """The run spec that the first of these peers trains, even if the directory does not hold that
    run. Raises `UserError`."""
    causes = []
    for peer_id in peer_ids:
        try:
            hello = pack(0, Hello(PROTOCOL_VERSION, ()))
            welcome = decode(await control.call(peer_id, hello, ASK_DEADLINE_S), Welcome)
            RunSpec.from_canonical_bytes(welcome.run_spec.payload)
            return welcome.run_spec.payload
        except (Unreachable, Refused, PeerFault) as error:
            causes.append(f"{peer_id}: {error.cause}")
        await asyncio.sleep(0)
    raise UserError(
        "nobody says which run is trained there: " + "; ".join(causes),
        "name the run: --run-digest DIGEST, which its members print",
        exit_code=UNREACHABLE,
    )


async def _refuse(sender: str, body: bytes) -> bytes:
    raise PeerFault("it only looks around", sender)


def as_json(seen: SwarmSeen) -> dict[str, Any]:
    """Members with devices, links and places, and the plan that most of them are in."""
    silent = [it.peer_id for it in seen.present if it.peer_id not in seen.facts]
    return {
        "run": seen.spec.name,
        "run_digest": seen.run_digest,
        "members": [_member(seen, facts) for facts in seen.facts.values()],
        "silent": silent,
        "links": _link_counts(seen.records),
        "plan": plan_seen(seen),
    }


def _member(seen: SwarmSeen, facts: Facts) -> dict[str, Any]:
    record = facts.record
    told = msgspec.to_builtins(msgspec.structs.replace(record, brief=msgspec.UNSET))
    place = seen.places.get(record.peer_id)
    return {
        **told,
        "name": record.called,
        "links": msgspec.to_builtins(record.links_among(seen.facts)),
        "layers": seen.layers_of(record.peer_id),
        "step": place.step if place is not None else None,
    }


def _link_counts(records: tuple[PeerRecord, ...]) -> dict[str, int]:
    counts = SwarmLinks(records).counts()
    return {source.value: counts[source] for source in Source if counts[source]}


def plan_seen(seen: SwarmSeen) -> dict[str, Any] | None:
    """The plan of the view that most members say they are in; of several such, the newest. One
    member alone could name any. None where nobody is in a view."""
    places = seen.places
    if not places:
        return None
    named = Counter((place.view, place.snapshot) for place in places.values())
    view = max(named, key=lambda it: (named[it], it))
    inside = {it: p for it, p in places.items() if (p.view, p.snapshot) == view}
    pipelines: dict[int, list[tuple[int, str]]] = {}
    for peer_id, place in inside.items():
        if place.end_layer > place.first_layer:
            pipelines.setdefault(place.pipeline, []).append((place.stage, peer_id))
    step_ns = max(place.step_ns for place in inside.values())
    return {
        "view": view[0],
        "snapshot": view[1],
        "step": max(place.step for place in inside.values()),
        "step_ns": step_ns,
        "tokens_per_s": round(seen.spec.tokens_per_s(step_ns), 1) if step_ns else None,
        "pipelines": [
            {
                "microbatches": inside[stages[0][1]].microbatches,
                "stages": [
                    {"peer_id": it, "layers": seen.layers_of(it)} for _, it in sorted(stages)
                ],
            }
            for _, stages in sorted(pipelines.items())
        ],
        "spares": sorted(it for it, p in inside.items() if p.end_layer == p.first_layer),
    }
