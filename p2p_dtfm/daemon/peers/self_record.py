"""This peer's record: what was measured of its device and links, kept up to date."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.facts.brief_links import BRIEF_FROM_MEMBERS, BriefLinks, brief
from p2p_dtfm.core.protocol.measured_plans import MeasuredPlan
from p2p_dtfm.core.protocol.records import (
    ADDRESS_LIMIT,
    ADDRESSES_LIMIT,
    PROTOCOL_VERSION,
    Device,
    Intent,
    Link,
    PeerRecord,
    Reachability,
    sign_record,
)
from p2p_dtfm.core.protocol.signed import Sign, Signed
from p2p_dtfm.core.protocol.snapshot import Member, Snapshot
from p2p_dtfm.core.schedule.tournament import partner_order
from p2p_dtfm.daemon.peers.facts.own_place import PLACES_FROM_MEMBERS, OwnPlace
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.probing import Probes
from p2p_dtfm.ports import now

PROBED_PEERS_LIMIT = 64
DRAWN_PEERS = 32
"""Where not all links are measured, so many are chosen in the order of the tournament, the others
by nearness."""
LINKS_KEPT = 256
LINKS_TOLD = 96
"""Links to members that are here, filled up to this number with links to others. A peer that comes
back as a newcomer is let in with a record of a newcomer's size (`consensus.opened_records`),
however many it has met."""
PUBLIC_LINKS = 24
"""So many links fit into the directory's 4 KiB as they are, beside a few addresses."""
PUBLIC_RECORD_LIMIT_BYTES = 3700
"""Part of the 4 KiB: the rest has room for the member's part in the plan and a second signature."""
PROBE_ROUNDS = 3
PROBE_PAUSE_S = 0.3
PROBE_AGAIN_S = 60.0
"""When a link that could not be measured is tried again. Each further pause is twice as long."""
PROBE_AGAIN_LIMIT_S = 960.0
GIVEN_UP_KEPT = 4096
NOTABLE_CHANGE = 0.3
"""How much live traffic must differ from the record before the record says so."""
REPLAN_RATIO = 4
"""By what factor a link must have changed before it alone is worth a new plan: load makes rates
waver."""
THIN_BYTES_PER_S = 12_500_000
"""100 Mbit/s. What a slower link carries is limited by the line, a faster one by its machine."""
NOTABLE_STEP_CHANGE = 0.05

log = logging.getLogger("p2p_dtfm")


class LinkNews(StrEnum):
    """What is known of links that the plan in force was made without."""

    MEASURED = "links were measured"
    """Measured for the first time, in this direction."""
    CHANGED = "links are others than they were"


@dataclass(frozen=True)
class _GivenUp:
    """A link that could not be measured."""

    again_s: float
    pause_s: float
    life: int
    """The life of its other end at that time; 0: it was not there."""


class SelfRecord:
    """Makes signed versions of this peer's record."""

    def __init__(
        self,
        me: Member,
        run_digest: str,
        device: Device,
        addresses: tuple[str, ...],
        probes: Probes,
    ) -> None:
        self._me = me
        self._run_digest = run_digest
        self._device = self.measured_device = device
        self._addresses = addresses
        self._probes = probes
        self._links: dict[str, Link] = {}
        self._given_up: dict[str, _GivenUp] = {}
        """Links given up, by peer. Those tried last come last."""
        self._lives: Mapping[str, int] = {}
        self._intent = Intent.TRAIN
        self._sequence = 0
        self._uplink_bytes_per_s = 0
        self._downlink_bytes_per_s = 0
        self._reachability = Reachability.UNKNOWN
        self._measured: tuple[MeasuredPlan, ...] = ()
        self._paces: dict[str, int] = {}
        self._name: str | msgspec.UnsetType = msgspec.UNSET
        self._straight: dict[str, bool] = {}
        """By peer: whether the link was direct when it was measured."""
        self._members: frozenset[str] = frozenset()
        self.place = OwnPlace(me.peer_id)
        if probes is not None:
            probes.said, probes.hear = self.place.said, self.place.hear

    def state_line(self, uplink_bytes_per_s: int, downlink_bytes_per_s: int) -> None:
        """What all links of this peer share, as its owner states it; 0: no limit."""
        self._uplink_bytes_per_s = uplink_bytes_per_s
        self._downlink_bytes_per_s = downlink_bytes_per_s

    def state_swarm(self, members: Iterable[str]) -> None:
        """Members of the swarm, and peers that come. In a large swarm the record names only some
        links."""
        self._members = frozenset(members)
        self.place.is_asked_for = len(self._members) >= PLACES_FROM_MEMBERS

    def state_lives(self, lives: Mapping[str, int]) -> None:
        """The peers that are here, with their lives. What failed in an earlier life says nothing of
        this one."""
        self._lives = lives
        for peer_id in self._given_up.keys() & lives.keys():
            if lives[peer_id] > self._given_up[peer_id].life:
                del self._given_up[peer_id]

    def state_name(self, name: str) -> None:
        """The name that the owner gives this peer; empty: the one that its identity makes."""
        self._name = name or msgspec.UNSET

    def state_steps(self, measured: tuple[MeasuredPlan, ...]) -> None:
        """What steps took under the last plans."""
        self._measured = measured

    def differs_in_steps(self, measured: tuple[MeasuredPlan, ...]) -> bool:
        """Whether the record tells of other plans than these, or of notably other times."""
        told = {plan.shape: plan.step_ns for plan in self._measured}
        now = {plan.shape: plan.step_ns for plan in measured}
        return told.keys() != now.keys() or any(
            abs(now[shape] - told[shape]) > NOTABLE_STEP_CHANGE * told[shape] for shape in now
        )

    def state_paces(self, paces: dict[str, int]) -> list[str]:
        """How slow others were seen to compute. Returns the peers of which that is news."""
        before, self._paces = self._paces, dict(paces)
        everybody = sorted(before.keys() | paces.keys())
        return [peer for peer in everybody if before.get(peer) != paces.get(peer)]

    def state_device(self, device: Device) -> None:
        """The device as it is seen to work, beside whatever else its machine does."""
        self._device = device

    @property
    def device(self) -> Device:
        return self._device

    def state_reachability(self, addresses: tuple[str, ...], reachability: Reachability) -> None:
        """Where others reach this peer, and how."""
        self._addresses, self._reachability = addresses, reachability

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others reach this peer, as the record says."""
        return self._addresses

    def leads_to(self, addresses: Iterable[str], reachability: Reachability) -> bool:
        """Whether the record says that others reach this peer at these addresses, in any order, and
        in this way."""
        return {*addresses} == {*self._addresses} and reachability is self._reachability

    def forget_where_changed(self, straight: Mapping[str, bool]) -> list[str]:
        """Forget links that lead another way than when they were measured, so that they are
        measured anew. Returns their peers."""
        changed = [
            peer
            for peer, now in straight.items()
            if peer in self._links and self._straight.get(peer, now) is not now
        ]
        for peer_id in changed:
            log.info("link to %s leads another way now: it is measured anew", peer_id)
            del self._links[peer_id], self._straight[peer_id]
        return changed

    async def probe_all(
        self, peers: Sequence[str], messenger: Messenger, progress: Callable[[int, int], None]
    ) -> None:
        """Measure the links to `peers`, one at a time; a busy one is tried again after the rest.

        `progress(done, total)` hears how many are done.
        """
        partners = partner_order(self._me.peer_id, sorted({*peers, self._me.peer_id}))
        waiting = [peer for peer in partners if peer is not None][:PROBED_PEERS_LIMIT]
        total = len(waiting)
        for _ in range(PROBE_ROUNDS):
            busy = []
            for peer_id in waiting:
                progress(len(self._links), total)
                if not await self._probe(peer_id, messenger):
                    busy.append(peer_id)
            waiting = busy
        for peer_id in waiting:
            log.info("link to %s not measured: it is tried again later", peer_id)

    async def _probe(self, peer_id: str, messenger: Messenger) -> bool:
        try:
            await messenger.connect(peer_id)
            await messenger.knock(peer_id)
            is_straight = await messenger.is_direct(peer_id)
            round_trip_ns = await self._probes.probe_round_trip(peer_id)
            bytes_per_s = await self._probes.probe_bandwidth(peer_id)
        except (Unreachable, Refused) as error:
            log.debug("probe of %s: %s", peer_id, error)
            return False
        self._links.pop(peer_id, None)
        self._links[peer_id] = Link(round_trip_ns, bytes_per_s)
        self._straight[peer_id] = is_straight
        if len(self._links) > LINKS_KEPT:
            oldest = next(iter(self._links))
            del self._links[oldest]
            self._straight.pop(oldest, None)
        return True

    def link_to(self, peer_id: str) -> Link | None:
        """The link as it was measured last."""
        return self._links.get(peer_id)

    def unmeasured(self, peers: Sequence[str]) -> list[str]:
        """Those of `peers` whose link is not measured and is worth another try, in turn order."""
        known = (self._links.keys() | self._given_up.keys()) - self._due()
        room = PROBED_PEERS_LIMIT - len(self._links.keys() & {*peers})
        order = partner_order(self._me.peer_id, sorted({*peers, self._me.peer_id}))
        waiting = [peer for peer in order if peer is not None and peer not in known]
        if len(order) > PROBED_PEERS_LIMIT and room <= PROBED_PEERS_LIMIT - DRAWN_PEERS:
            waiting = self.place.by_nearness(waiting)
        return waiting[: max(0, room)]

    def _due(self) -> set[str]:
        """The peer worth another try after one has failed; at most one, since a peer that does not
        answer takes long. It must be here, or absent ones would be called for ever."""
        now_s = now.monotonic_s()
        due = (it for it, given in self._given_up.items() if given.again_s <= now_s)
        return set(itertools.islice((it for it in due if it in self._lives), 1))

    async def probe_one(self, peer_id: str, messenger: Messenger) -> bool:
        """Measure the link to a peer that turned up later. Returns whether that worked."""
        for _ in range(PROBE_ROUNDS):
            if await self._probe(peer_id, messenger):
                self._given_up.pop(peer_id, None)
                return True
            await asyncio.sleep(PROBE_PAUSE_S)
        self._give_up(peer_id)
        return False

    def _give_up(self, peer_id: str) -> None:
        """Give a link up for now."""
        before = self._given_up.get(peer_id)
        pause_s = PROBE_AGAIN_S if before is None else min(2 * before.pause_s, PROBE_AGAIN_LIMIT_S)
        given = _GivenUp(now.monotonic_s() + pause_s, pause_s, self._lives.get(peer_id, 0))
        put_newest(self._given_up, peer_id, given, GIVEN_UP_KEPT)

    def learn_from_traffic(self, estimate: Callable[[str], int | None]) -> bool:
        """Take over what live traffic shows. Returns whether that differs notably from the
        record."""
        changed = False
        for peer_id, link in list(self._links.items()):
            seen = estimate(peer_id)
            if seen is None:
                continue
            if abs(seen - link.bytes_per_s) > NOTABLE_CHANGE * link.bytes_per_s:
                self._links[peer_id] = Link(link.round_trip_ns, seen)
                changed = True
        return changed

    def news_to(self, snapshot: Snapshot) -> LinkNews | None:
        """News of links among the members, which this peer knows and the snapshot does not."""
        records = {record.peer_id: record for record in snapshot.records}
        mine = records[self._me.peer_id]
        found = None
        for peer_id, link in self._links.items():
            if peer_id not in records:
                continue
            before, guess = mine.link_to(peer_id), records[peer_id].link_to(self._me.peer_id)
            assumed = before or guess  # the other direction's stands in for one not measured
            if assumed is None:
                return LinkNews.MEASURED
            slower, faster = sorted((link.bytes_per_s, assumed.bytes_per_s))
            if faster > REPLAN_RATIO * slower:
                found = LinkNews.CHANGED
                if before is None and slower < THIN_BYTES_PER_S:
                    return LinkNews.MEASURED
        return found

    def begin_life(self, me: Member) -> None:
        """Begin another life: the same peer comes back as a newcomer."""
        self._me = me

    def make(self, signer: Sign, intent: Intent | None = None) -> tuple[PeerRecord, Signed]:
        """A new version of the record."""
        self._sequence += 1
        self._intent = intent or self._intent
        record = self._record(len(self._members) >= BRIEF_FROM_MEMBERS)
        return record, sign_record(record, signer)

    def make_public(self, signer: Sign) -> Signed:
        """The last version as the directory carries it, without what steps took and which peers are
        slow.

        Links take a few bytes each where they are many, or would leave addresses no room. Addresses
        are told as far as there is room, the first of them first.
        """
        is_brief = len(self._links) > PUBLIC_LINKS or len(self._members) >= BRIEF_FROM_MEMBERS
        record = msgspec.structs.replace(self._record(is_brief), measured=(), paces={})
        signed = sign_record(record, signer)
        if not is_brief and _is_too_large(signed):
            record = msgspec.structs.replace(self._record(True), measured=(), paces={})
            signed = sign_record(record, signer)
        while record.addresses and _is_too_large(signed):
            record = msgspec.structs.replace(record, addresses=record.addresses[:-1])
            signed = sign_record(record, signer)
        return signed

    def _record(self, is_brief: bool) -> PeerRecord:
        return PeerRecord(
            peer_id=self._me.peer_id,
            life=self._me.life,
            sequence=self._sequence,
            protocol_version=PROTOCOL_VERSION,
            run_digest=self._run_digest,
            device=self._device,
            uplink_bytes_per_s=self._uplink_bytes_per_s,
            downlink_bytes_per_s=self._downlink_bytes_per_s,
            links={} if is_brief else self._told_links(),
            addresses=tuple(it for it in self._addresses if len(it) <= ADDRESS_LIMIT)[
                :ADDRESSES_LIMIT
            ],
            reachability=self._reachability,
            intent=self._intent,
            measured=self._measured,
            name=self._name,
            brief=self._brief() if is_brief else msgspec.UNSET,
            paces=self._paces,
        )

    def _told_links(self) -> dict[str, Link]:
        """The links to tell. Of peers that have gone, the last ones are told: they may come
        back."""
        gone = [peer for peer in self._links if peer not in self._members]
        room = max(0, LINKS_TOLD - len(self._links) + len(gone))
        forgotten = set(gone[: max(0, len(gone) - room)])
        return {peer: link for peer, link in self._links.items() if peer not in forgotten}

    def _brief(self) -> BriefLinks:
        """Brief links. Those to peers that have gone are left out."""
        there = self._members or self._links.keys()
        links = {peer: link for peer, link in self._links.items() if peer in there}
        return brief(self._me.peer_id, links, self.place.coordinate)


def _is_too_large(signed: Signed) -> bool:
    """Whether the directory would not take it."""
    return len(encode(signed)) > PUBLIC_RECORD_LIMIT_BYTES


def links_are_measured(records: tuple[PeerRecord, ...]) -> bool:
    """Whether each pair's link is measured from one end at least."""
    return all(
        left.link_to(right.peer_id) is not None or right.link_to(left.peer_id) is not None
        for left, right in itertools.combinations(records, 2)
    )
