"""Where nodes of the directory are, by the word of other nodes.

hivemind's nodes name one another by their ids alone. p2pd's own routing would find the addresses,
but it calls whatever strangers name, whenever it likes; so it is off. Instead each node tells those
that it asks where it is, and asks them where others are. Addresses in an answer are claims, so
their owners are called few at a time, and slowly.
"""

import contextlib

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.calling import door_of, put_newest
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host

REMEMBERED = 1024
ADDRESSES_LIMIT = 4
ADDRESS_LIMIT = 256
NAMED_LIMIT = 4
GUIDES_LIMIT = 4
"""How many of the nodes that answered last are asked."""
DEADLINE_S = 5.0
_REQUEST_LIMIT_BYTES = 2048


class WhereIs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A question: the asking node is at `own`, and asks where these nodes are."""

    own: tuple[str, ...]
    peer_ids: tuple[str, ...] = ()


class AreThere(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An answer: where each of the nodes has said that it is. Unknown nodes are left out. The
    answering node is at `own`."""

    own: tuple[str, ...]
    found: dict[str, tuple[str, ...]]


class Whereabouts:
    """Tells nodes where this one is, and finds others. `await ready()` before others may ask."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._control = ControlPlane(host, self._answer, name="whereabouts")
        self._said: dict[str, tuple[str, ...]] = {}
        self._guides: dict[str, None] = {}

    async def ready(self) -> "Whereabouts":
        """Start to answer."""
        await self._control.ready()
        return self

    async def close(self) -> None:
        """Answer nobody any more."""
        await self._control.close()

    async def greet(self, peer_id: str) -> None:
        """Tell a node where this one is. From now on that node is asked for others."""
        with contextlib.suppress(Unreachable, Refused, PeerFault):
            await self._ask(peer_id, ())

    async def reach(self, peer_id: str) -> bool:
        """Connect to a node that somebody named, where this peer or one of its guides knows its
        addresses."""
        if known := self._host.where(peer_id):
            with contextlib.suppress(Unreachable):
                await self._host.connect(peer_id, known, DEADLINE_S)
                return True
        for guide in [*reversed(self._guides)][:GUIDES_LIMIT]:
            with contextlib.suppress(Unreachable, Refused, PeerFault):
                found = (await self._ask(guide, (peer_id,))).found.get(peer_id, ())
                if found:
                    await self._host.connect(peer_id, found[:ADDRESSES_LIMIT], DEADLINE_S)
                    await self.greet(peer_id)
                    return True
        return False

    async def _ask(self, peer_id: str, peer_ids: tuple[str, ...]) -> AreThere:
        own = (await self._host.addresses())[:ADDRESSES_LIMIT]
        request = encode(WhereIs(own, peer_ids))
        reply = await self._control.call(peer_id, request, DEADLINE_S)
        put_newest(self._guides, peer_id, None, REMEMBERED)
        answer = decode(reply, AreThere, _REQUEST_LIMIT_BYTES * NAMED_LIMIT)
        self._note(peer_id, answer.own)
        return answer

    async def _answer(self, sender: str, body: bytes) -> bytes:
        request = decode(body, WhereIs, _REQUEST_LIMIT_BYTES)
        if len(request.peer_ids) > NAMED_LIMIT or len(request.own) > ADDRESSES_LIMIT:
            raise PeerFault("asks for too many nodes at once", sender)
        self._note(sender, request.own)
        found = {it: self._said[it] for it in request.peer_ids if it in self._said}
        return encode(AreThere((await self._host.addresses())[:ADDRESSES_LIMIT], found))

    def _note(self, peer_id: str, own: tuple[str, ...]) -> None:
        sound = tuple(at for at in own if len(at) <= ADDRESS_LIMIT and door_of(at))
        put_newest(self._said, peer_id, sound[:ADDRESSES_LIMIT], REMEMBERED)
