"""The door before hivemind's DHT. It decides by a call's size, before anything of the call is
read."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.hivemind_parts import PeerID, dht_pb2

KEYS_LIMIT = 256
"""The most keys of one request."""
REFUSED_READ_BYTES = 16 << 10
"""A refused call is read only up to this size. So a correct caller learns that nothing was wrong
with its node, and that it is to come again."""
REQUEST_LIMITS_BYTES = {
    dht_pb2.PingRequest: 256,
    dht_pb2.FindRequest: REFUSED_READ_BYTES,
    dht_pb2.StoreRequest: 1 << 20,
}

Handler = Callable[[Any, Any], Awaitable[Any]]


@dataclass(frozen=True)
class Caller:
    """The part of hivemind's context of a call that handlers use."""

    remote_id: PeerID


class Doorway:
    """hivemind's p2p, to which its protocol adds handlers. Without this, hivemind itself reads a
    call first: two million empty keys then took as many objects before any door was asked.

    `enter(sender, request_type, size_bytes)` says whether a call comes in. `blame(sender)` notes
    that what came in was wrong. `refusal(request)` answers what does not come in.
    """

    def __init__(
        self,
        p2p: Any,
        enter: Callable[[str, type, int], bool],
        blame: Callable[[str], None],
        refusal: Callable[[Any], Any],
    ) -> None:
        self._p2p = p2p
        self._enter = enter
        self._blame = blame
        self._refusal = refusal

    async def add_protobuf_handler(
        self, name: str, handler: Handler, request_type: Any, balanced: bool = False, **_: bool
    ) -> None:
        """Add a handler in place of hivemind's own. No call of the DHT is a stream."""

        async def serve(call: bytes, caller: PeerID) -> bytes:
            sender = caller.to_base58()
            if not self._enter(sender, request_type, len(call)):
                if len(call) > REFUSED_READ_BYTES:
                    raise PeerFault("too much, or too often", sender)
                return bytes(self._refusal(request_type.FromString(call)).SerializeToString())
            if len(call) > REQUEST_LIMITS_BYTES[request_type]:
                self._blame(sender)
                raise PeerFault(f"a call of {len(call)} bytes", sender)
            request = request_type.FromString(call)
            if len(getattr(request, "keys", ())) > KEYS_LIMIT:
                self._blame(sender)
                raise PeerFault(f"a call about {len(request.keys)} keys", sender)
            return bytes((await handler(request, Caller(caller))).SerializeToString())

        await self._p2p._client.add_unary_handler(name, serve, balanced=balanced)
