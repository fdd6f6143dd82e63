"""Which connections p2pd keeps. Where it has more than 512 it closes some, those first over which
nothing goes: as the ones to members whose tensors and calls have lines of their own."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.hivemind_parts import PeerID, p2pd_pb2, p2pd_wire

LOOK_EVERY_S = 10.0
"""For two minutes p2pd closes nobody who is new: haste is of no use to strangers."""
DEADLINE_S = 10.0
"""For p2pd to take it."""
FEW = 64
"""So many connections are far from too many."""
_TAG, _WEIGHT = "known", 100


async def keep_known(
    p2p: Any,
    connected: Callable[[], Awaitable[Iterable[str]]],
    is_known: Callable[[str], bool],
) -> None:
    """From time to time, until it is cancelled, tell p2pd whose connections count more than those
    of strangers. It forgets that with the connection."""
    while True:
        with contextlib.suppress(Unreachable):
            peers = tuple(await connected())
            if len(peers) > FEW:
                await prefer(p2p, filter(is_known, peers))
        await asyncio.sleep(LOOK_EVERY_S)


async def prefer(p2p: Any, peer_ids: Iterable[str]) -> None:
    """Raises `Unreachable` where p2pd says nothing."""
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
