"""The directory of a virtual network: one shelf, which every peer with a connection reaches."""

import asyncio
from collections.abc import Sequence

import msgspec

from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.net.directory.directory import PRESENCE_TTL_S
from p2p_dtfm.net.directory.facts import PublishedPart
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.wires.host import VirtualHost
from p2p_dtfm.testbed.virtual.wires.network import VirtualNetwork

ROUND_TRIP_S = 0.02


class VirtualDirectory:
    """What `net.directory.directory.Directory` is over the DHT."""

    def __init__(self, network: VirtualNetwork, host: VirtualHost) -> None:
        self._host = host
        self._runs = network.shelf.setdefault("runs", {})
        self._presences = network.shelf.setdefault("presences", {})

    def call_again_at(self, addresses: Sequence[str]) -> None:
        """Does nothing: the shelf forgets nobody."""

    def seal(self, run_digest: str, key: bytes) -> None:
        """Does nothing: nobody else reads this shelf."""

    async def publish_presence(
        self, presence: Presence, expires_in_s: float = PRESENCE_TTL_S
    ) -> bool:
        await self._reach()
        expires_ms = int((now.wall_s() + expires_in_s) * 1000)
        self._presences[presence.peer_id] = msgspec.structs.replace(presence, expires_ms=expires_ms)
        return True

    async def present_peers(self, run_digest: str) -> list[Presence]:
        if not await self._reach():
            return []
        held = [each for each in self._presences.values() if isinstance(each, Presence)]
        fresh = [
            each
            for each in held
            if each.run_digest == run_digest and each.expires_ms > now.wall_s() * 1000
        ]
        return sorted(fresh, key=lambda each: each.peer_id)

    async def present_by_node(
        self, peer_ids: Sequence[str], run_digest: str
    ) -> list[list[Presence]]:
        linked = [peer_id for peer_id in peer_ids if self._host.is_linked(peer_id)]
        present = await self.present_peers(run_digest)
        return [present for _ in linked]

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._host.linked_peers)

    async def publish_facts(
        self, run_digest: str, record: Signed, place: PublishedPart | None
    ) -> bool:
        return True  # nobody reads them there

    async def publish_run(self, run_digest: str, signed: Signed) -> bool:
        await self._reach()
        self._runs[run_digest] = signed
        return True

    async def fetch_run(self, run_digest: str) -> Signed | None:
        if not await self._reach():
            return None
        held = self._runs.get(run_digest)
        return held if isinstance(held, Signed) else None

    async def meet_again(self) -> bool:
        return False  # and so nobody is called

    async def meet(self, peer_ids: Sequence[str]) -> None:
        await self._reach()

    async def close(self) -> None:
        """Does nothing: the shelf stays."""

    async def _reach(self) -> bool:
        """Whether this host has anybody to ask."""
        await asyncio.sleep(ROUND_TRIP_S)
        return bool(self._host.linked_peers)
