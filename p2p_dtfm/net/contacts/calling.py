"""Which peers this one calls by itself: those that it trusts, and few others, slowly.

An unknown peer has to make a connection of its own, or this peer does not speak to it. Once that
connection is gone, the unknown peer has to come again by itself. p2pd remembers whatever addresses
such a peer has told it, and calls all of them, whichever it is given. A peer that was never here
only claims its addresses. They are believed where others see its connection come from there; else
`core.gate.dialling` rations the calls.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from p2p_dtfm.core.gate.dialling import ADDRESSES_OF_ONE, Dialling, Door
from p2p_dtfm.net.contacts.addresses import (
    far_end,
    host_and_port,
    is_relayed,
    is_way,
    one_spelling,
)
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import now

Value = TypeVar("Value")
Ends = Callable[[], Awaitable[dict[str, tuple[str, ...]]]]
FRESH_S = 0.05
"""For this long p2pd is not asked again which connections there are. If a peer has gone meanwhile,
p2pd itself chooses where to call it."""
MET_S = 1800.0
"""How long p2pd remembers the addresses of a peer that was connected."""
PEERS_REMEMBERED = 4096
GONE = "its connection is gone, and it has not come again"
NO_WAY = "it has no connection to this peer, and its addresses are only its own word"


class Calling:
    """Which peers may be called, and where. `ends()` gives the far ends of the present
    connections."""

    def __init__(self, ends: Ends) -> None:
        self.trusts: Callable[[str], bool] = lambda peer_id: True
        """Whether this peer calls another wherever it is said to be; set by the owner of the member
        list."""
        self.dialling = Dialling()
        self._ends = ends
        self._linked: dict[str, tuple[str, ...]] = {}
        self._looked_s = -FRESH_S
        self._looking = asyncio.Lock()
        self._seen: dict[str, str] = {}
        self._met_s: dict[str, float] = {}
        """When each peer was last seen to have a connection to this one."""
        self.heard_s = 0.0
        """When p2pd last brought anybody's word, on this process's monotonic clock."""
        self.vouched: dict[str, None] = {}
        """Peers that the user has named, or members. The one that was named longest ago is
        forgotten first."""

    def vouch(self, peer_id: str) -> None:
        """Note a peer that this one knows from its user, or from peers that it believes."""
        put_newest(self.vouched, peer_id, None, PEERS_REMEMBERED)

    def seen_by_another(self, peer_id: str, host: str) -> None:
        """Note where a peer's connection comes from, by the word of a peer that is believed."""
        if host and peer_id not in self._seen:
            put_newest(self._seen, peer_id, host, PEERS_REMEMBERED)

    def heard(self, peer_id: str) -> None:
        """Note that p2pd has brought a peer's word."""
        self.heard_s = now.monotonic_s()
        self.met(peer_id)

    def met(self, peer_id: str) -> None:
        """Note that a peer has a connection of its own, or says something over a direct line."""
        put_newest(self._met_s, peer_id, now.monotonic_s(), PEERS_REMEMBERED)

    def _was_here(self, peer_id: str) -> bool:
        met_s = self._met_s.get(peer_id)
        return met_s is not None and now.monotonic_s() - met_s < MET_S

    async def is_linked(self, peer_id: str) -> bool:
        """Whether there is a connection to a peer, as of a moment ago."""
        asked_s = now.monotonic_s()
        if peer_id in self._linked and asked_s - self._looked_s < FRESH_S:
            return True
        await self._look(asked_s)
        return self._note(peer_id)

    async def _look(self, asked_s: float) -> None:
        async with self._looking:
            if self._looked_s < asked_s:
                looked_s = now.monotonic_s()
                self._linked = await self._ends()
                self._looked_s = looked_s

    def _note(self, peer_id: str) -> bool:
        """Whether the peer has a connection. Notes where that comes from."""
        ends = self._linked.get(peer_id)
        if ends is not None:
            self.met(peer_id)
        if ends and (end := far_end(ends[0])) is not None:
            put_newest(self._seen, peer_id, end[0], PEERS_REMEMBERED)
        return ends is not None

    async def seen_hosts(self, peer_ids: Sequence[str]) -> list[str]:
        """The host that each peer's own connection comes from, or came from at the last look; empty
        where not known. One look for all."""
        if peer_ids:
            await self._look(now.monotonic_s())
        for peer_id in peer_ids:
            self._note(peer_id)
        return [self._seen.get(peer_id, "") for peer_id in peer_ids]

    async def may_look_for(self, peer_id: str) -> bool:
        """Whether p2pd may now look for an unknown node of the directory, at addresses that others
        told it."""
        if self.trusts(peer_id) or await self.is_linked(peer_id):
            return True
        return not self._was_here(peer_id) and self.dialling.may_look(now.monotonic_ns())

    def choose(self, peer_id: str, addresses: Sequence[str]) -> tuple[str, ...]:
        """The addresses at which an unknown peer is called now. Raises `Unreachable`."""
        if self._was_here(peer_id):
            raise Unreachable(peer_id, GONE)
        ways = [address for address in addresses if self._leads_through_friend(address)]
        if ways:
            return tuple(ways[:ADDRESSES_OF_ONE])
        doors = {address: door for address in addresses if (door := door_of(address))}
        now_ns = now.monotonic_ns()
        chosen = self.dialling.choose(list(doors.values()), self._seen.get(peer_id), now_ns)
        if not chosen:
            raise Unreachable(peer_id, NO_WAY)
        return tuple(address for address, door in doors.items() if door in chosen)[: len(chosen)]

    def look_up(self, peer_id: str, addresses: Sequence[str], was_there: bool) -> tuple[str, ...]:
        """The addresses at which a peer that the directory names is looked for now. Raises
        `Unreachable`."""
        doors = {address: door for address in addresses if (door := door_of(address))}
        chosen = self.dialling.look_up(list(doors.values()), was_there, now.monotonic_ns())
        if not chosen:
            raise Unreachable(peer_id, "others were looked for there, and in vain")
        return tuple(address for address, door in doors.items() if door in chosen)[: len(chosen)]

    def not_called(self, addresses: Sequence[str]) -> None:
        """Take back what `choose` gave: those addresses were not called, or were calling here."""
        self.dialling.give_back([door for it in addresses if (door := door_of(it)) is not None])

    def _leads_through_friend(self, address: str) -> bool:
        """Whether the address leads only through a relay that this peer is connected to. Any other
        relay would be called at an address that is the unknown peer's word."""
        if not is_relayed(address) or door_of(address) is None:
            return False
        relay = address.partition("/p2p/")[2].split("/", 1)[0]
        return relay in self._linked

    async def answered(self, peer_id: str) -> None:
        """Note that a call has reached the peer itself, so that its door was not knocked at in
        vain."""
        self._looked_s = -FRESH_S
        is_linked = await self.is_linked(peer_id)
        if is_linked and (end := far_end(self._linked[peer_id][0])) is not None:
            self.dialling.answered(end)


def put_newest(kept: dict[str, Value], key: str, value: Value, limit: int) -> None:
    """Put an entry as the newest of at most `limit`. The one that was put longest ago goes."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > limit:
        del kept[next(iter(kept))]


def door_of(address: str) -> Door | None:
    """Host and port of an address, None if it is malformed. However a host is spelt, its door is
    one."""
    if not is_way(address):
        return None
    host, port = host_and_port(address)
    return one_spelling(host), port
