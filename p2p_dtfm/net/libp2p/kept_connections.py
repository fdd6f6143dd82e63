"""Which connections p2pd keeps, and whether it still answers. Above 512 connections it closes some,
idle ones first. Those to members whose tensors and calls have direct lines look idle, too."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from p2p_dtfm.net.contacts.calling import Calling
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.hivemind_parts import PeerID, p2pd_pb2, p2pd_wire
from p2p_dtfm.ports import now

LOOK_EVERY_S = 10.0
"""p2pd closes no new connection for two minutes, so strangers gain nothing by haste."""
DEADLINE_S = 10.0
"""How long p2pd may take to be told of the connections that count."""
FEW = 64
"""Up to so many connections p2pd is not told which of them count: it closes none."""
ANSWERS_WITHIN_S = 5.0
"""How long p2pd may take to say whom it is connected to."""
LATE_S = 2.0
"""A look that is later than this shows that this process has no time, as on a machine that
swaps."""
SILENT_LIMIT_S = 120.0
_TAG, _WEIGHT = "known", 100


log = logging.getLogger(__name__)


class Silence:
    """How long a living p2pd has answered nothing. Nobody is heard through it then, and no new one
    is started. It is ended after `SILENT_LIMIT_S` of looks by a process that had the time."""

    def __init__(self, calling: Calling, end: Callable[[], None]) -> None:
        self._calling = calling
        self._end = end
        self.over()

    def over(self) -> None:
        """Note that p2pd has answered."""
        self._silent_s, self._looked_s = 0.0, now.monotonic_s()

    def lasts(self) -> None:
        """Note that p2pd has not answered. If it let a peer be heard meanwhile, its silence begins
        anew."""
        since_s, self._looked_s = self._looked_s, now.monotonic_s()
        if self._calling.heard_s >= since_s:
            self._silent_s = 0.0
        elif self._looked_s - since_s <= LOOK_EVERY_S + ANSWERS_WITHIN_S + LATE_S:
            self._silent_s += self._looked_s - since_s
        if self._silent_s >= SILENT_LIMIT_S:
            log.error(
                "the libp2p daemon of this peer has answered nothing for %.0f s: ends it",
                self._silent_s,
            )
            self._end()


async def keep_known(
    p2p: Any,
    connected: Callable[[], Awaitable[Iterable[str]]],
    is_known: Callable[[str], bool],
    silence: Silence,
) -> None:
    """Tell p2pd from time to time whose connections count more than strangers', until cancelled.
    p2pd forgets that with the connection."""
    while True:
        try:
            peers = tuple(await connected())
            silence.over()
            if len(peers) > FEW:
                await prefer(p2p, filter(is_known, peers))
        except Unreachable as error:
            if isinstance(error.__cause__, TimeoutError):
                silence.lasts()
        await asyncio.sleep(LOOK_EVERY_S)


async def prefer(p2p: Any, peer_ids: Iterable[str]) -> None:
    """Tell p2pd that the connections to these peers count. Raises `Unreachable` where p2pd says
    nothing."""
    control = p2p._client.control
    try:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await control.daemon_connector.open_connection()
            try:
                for peer_id in peer_ids:
                    tag = p2pd_pb2.ConnManagerRequest(
                        type=p2pd_pb2.ConnManagerRequest.TAG_PEER,
                        peer=PeerID.from_base58(peer_id).to_bytes(),
                        tag=_TAG,
                        weight=_WEIGHT,
                    )
                    request = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNMANAGER, connManager=tag)
                    await p2pd_wire.write_pbmsg(writer, request)
                    await p2pd_wire.read_pbmsg_safe(reader, p2pd_pb2.Response())
            finally:
                writer.close()
    except (OSError, EOFError, RuntimeError, TimeoutError) as error:
        raise Unreachable(p2p.peer_id.to_base58(), "it tells p2pd of nobody") from error
