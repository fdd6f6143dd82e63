"""How a connection begins: TLS proves who is at either end, and carries the secrets of the records
that follow."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from p2p_dtfm.net.direct.sealed import SECRET_BYTES, Keys, SealedSocket

FOR_LANES, FOR_CALLS = b"\x00", b"\x01"
"""What the side that calls wants the connection for."""
_TO_CLIENT, _TO_SERVER = b"to client", b"to server"
Result = TypeVar("Result")


async def shake_hands(connection: ssl.SSLSocket) -> None:
    """Do the TLS handshake without holding up the event loop. Raises `OSError`."""
    await _in_steps(connection, connection.do_handshake)


async def call_out(connection: ssl.SSLSocket, purpose: bytes) -> SealedSocket:
    """Seal a connection after `shake_hands`, at the side that calls, which says what the connection
    is for. Raises `OSError`."""
    own = os.urandom(SECRET_BYTES)
    await _in_steps(connection, partial(connection.send, own + purpose))
    return _seal(connection, own, await _told(connection, SECRET_BYTES), is_server=False)


async def answer(connection: ssl.SSLSocket) -> tuple[SealedSocket, bytes]:
    """Seal a connection at the side that is called. Returns also what the connection is for. Raises
    `OSError`."""
    own = os.urandom(SECRET_BYTES)
    await _in_steps(connection, partial(connection.send, own))
    told = await _told(connection, SECRET_BYTES + 1)
    theirs, purpose = told[:SECRET_BYTES], told[SECRET_BYTES:]
    if purpose not in (FOR_LANES, FOR_CALLS):
        raise ConnectionAbortedError("a line for something unknown")
    return _seal(connection, own, theirs, is_server=True), purpose


async def _told(connection: ssl.SSLSocket, size_bytes: int) -> bytes:
    told = b""
    while len(told) < size_bytes:
        missing = size_bytes - len(told)
        piece: bytes = await _in_steps(connection, partial(connection.recv, missing))
        if not piece:
            raise ConnectionResetError("it ended before a secret came")
        told += piece
    if connection.pending():
        raise ConnectionAbortedError("more than a secret came")
    return told


def _seal(connection: ssl.SSLSocket, own: bytes, theirs: bytes, is_server: bool) -> SealedSocket:
    """Seal records from now on with keys made of both fresh secrets, one from each side. The TLS
    connection is of no use any more."""
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
