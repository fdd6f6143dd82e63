"""How a connection begins: TLS says who is who, and carries the secrets of what follows."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from p2p_dtfm.net.direct.sealed import SECRET_BYTES, Keys, SealedSocket

_TO_CLIENT, _TO_SERVER = b"to client", b"to server"
Result = TypeVar("Result")


async def shake_hands(connection: ssl.SSLSocket) -> None:
    """TLS, without holding up the event loop. Raises `OSError`."""
    await _in_steps(connection, connection.do_handshake)


async def seal(connection: ssl.SSLSocket, is_server: bool) -> SealedSocket:
    """After `shake_hands`: either side tells the other a fresh secret, and from then on records are
    sealed with keys made of both. The TLS connection is of no use any more. Raises `OSError`."""
    own, theirs = os.urandom(SECRET_BYTES), b""
    await _in_steps(connection, partial(connection.send, own))
    while len(theirs) < SECRET_BYTES:
        missing = SECRET_BYTES - len(theirs)
        piece: bytes = await _in_steps(connection, partial(connection.recv, missing))
        if not piece:
            raise ConnectionResetError("it ended before a secret came")
        theirs += piece
    if connection.pending():
        raise ConnectionAbortedError("more than a secret came")
    secrets = theirs + own if is_server else own + theirs
    to_client, to_server = Keys(secrets, _TO_CLIENT), Keys(secrets, _TO_SERVER)
    bare = socket.socket(fileno=connection.detach())
    bare.setblocking(False)
    keys = (to_client, to_server) if is_server else (to_server, to_client)
    sealed = SealedSocket(bare, *keys)
    sealed.suit_distance()
    return sealed


async def _in_steps(connection: ssl.SSLSocket, step: Callable[[], Result]) -> Result:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            await _ready(connection, loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await _ready(connection, loop.add_writer, loop.remove_writer)


async def _ready(
    connection: ssl.SSLSocket,
    watch: Callable[..., None],
    leave: Callable[[ssl.SSLSocket], bool],
) -> None:
    ready = asyncio.Event()
    watch(connection, ready.set)
    try:
        await ready.wait()
    finally:
        leave(connection)
