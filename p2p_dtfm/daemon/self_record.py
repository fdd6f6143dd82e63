"""This peer's record: what was measured of its device and links, kept up to date."""

import logging
from collections.abc import Callable, Sequence

from p2p_dtfm.core.records import (
    PROTOCOL_VERSION,
    Device,
    Intent,
    Link,
    PeerRecord,
    Reachability,
    sign_record,
)
from p2p_dtfm.core.signed import Sign, Signed
from p2p_dtfm.core.snapshot import Member
from p2p_dtfm.core.tournament import partner_order
from p2p_dtfm.daemon.courier import Courier
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.probing import Probes

PROBED_PEERS_LIMIT = 64
PROBE_ROUNDS = 3
NOTABLE_CHANGE = 0.3

log = logging.getLogger("p2p_dtfm")


class SelfRecord:
    """Makes signed versions of the record."""

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
        self._device = device
        self._addresses = addresses
        self._probes = probes
        self._links: dict[str, Link] = {}
        self._intent = Intent.TRAIN
        self._sequence = 0

    async def probe_all(
        self, peers: Sequence[str], courier: Courier, say: Callable[[str], None]
    ) -> None:
        """Measure the links to `peers`, one at a time; a busy one is tried again after the rest."""
        waiting = partner_order(self._me.peer_id, sorted({*peers, self._me.peer_id}))
        waiting = [peer for peer in waiting if peer is not None][:PROBED_PEERS_LIMIT]
        total = len(waiting)
        for _ in range(PROBE_ROUNDS):
            busy = []
            for peer_id in waiting:
                say(f"link {len(self._links) + 1} of {total}, to {peer_id}")
                if not await self._probe(peer_id, courier):
                    busy.append(peer_id)
            waiting = busy
        for peer_id in waiting:
            log.info("link to %s not measured: it will be learnt from traffic", peer_id)

    async def _probe(self, peer_id: str, courier: Courier) -> bool:
        try:
            await courier.connect(peer_id)
            round_trip_ns = await self._probes.probe_round_trip(peer_id)
            bytes_per_s = await self._probes.probe_bandwidth(peer_id)
        except (Unreachable, Refused) as error:
            log.debug("probe of %s: %s", peer_id, error)
            return False
        self._links[peer_id] = Link(round_trip_ns, bytes_per_s)
        return True

    def learn_from_traffic(self, estimate: Callable[[str], int | None]) -> bool:
        """Take over what live traffic shows; whether that differs notably from the record."""
        changed = False
        for peer_id, link in list(self._links.items()):
            seen = estimate(peer_id)
            if seen is None:
                continue
            if abs(seen - link.bytes_per_s) > NOTABLE_CHANGE * link.bytes_per_s:
                self._links[peer_id] = Link(link.round_trip_ns, seen)
                changed = True
        return changed

    def make(self, signer: Sign, intent: Intent | None = None) -> tuple[PeerRecord, Signed]:
        """A new version of the record."""
        self._sequence += 1
        self._intent = intent or self._intent
        record = PeerRecord(
            peer_id=self._me.peer_id,
            life=self._me.life,
            sequence=self._sequence,
            protocol_version=PROTOCOL_VERSION,
            run_digest=self._run_digest,
            device=self._device,
            uplink_bytes_per_s=0,
            downlink_bytes_per_s=0,
            links=dict(self._links),
            addresses=self._addresses,
            reachability=Reachability.DIRECT,
            intent=self._intent,
        )
        return record, sign_record(record, signer)
