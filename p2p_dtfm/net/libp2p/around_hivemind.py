"""Cures for what hivemind leaves undone: calls and streams that end early, addresses that it cannot
read, and sockets of dead processes."""

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

log = logging.getLogger("p2p_dtfm.net")

_FOLDER = Path("/tmp")  # hivemind's own choice, whatever TMPDIR says
_PATTERN = "hivemind-p2p*-*.sock"
_AT_MOST = 4096
_MINIMUM_AGE_S = 60

STREAMS_WAITING = 4096
"""How many streams may wait to be accepted. By default Linux lets no more wait."""

UNREADABLE = "/unreadable"
"""Stands for a connection's address that has a part unknown to hivemind."""


class PendingCalls(dict[Any, asyncio.Future[Any]]):
    """hivemind's calls that wait for an answer, without those that already gave up waiting.

    hivemind's reader sets the result of any call it finds here. For a call that was cancelled in
    the same turn of the loop that would raise, and end the reader and all later calls.
    """

    def __contains__(self, call_id: object) -> bool:
        future = self.get(call_id)
        return future is not None and not future.done()


@contextlib.asynccontextmanager
async def listen_with_room(control: Any) -> AsyncIterator[Any]:
    """Listen where p2pd brings streams, calls among them, with room for many that wait. hivemind
    lets a hundred wait, and p2pd ends what comes while a busy event loop accepts none."""
    where = control.listen_maddr["unix"]
    async with await asyncio.start_unix_server(control._handler, where, backlog=STREAMS_WAITING):
        yield control


def expect_broken_streams(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore streams that break before they have said anything: hivemind leaves their errors to the
    loop.

    Such an error is no news: the opener of the stream is watched, and reported, elsewhere.
    """

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        is_greeting = "client_connected_cb" in context.get("message", "")
        if is_greeting and isinstance(error, asyncio.IncompleteReadError | ConnectionError):
            log.debug("a stream broke before it was greeted: %r", error)
        else:
            loop.default_exception_handler(context)

    if loop.get_exception_handler() is None:
        loop.set_exception_handler(handle)


def readable(address: Any) -> str | None:
    """A multiaddr of p2pd as text; None where hivemind cannot read it. p2pd knows more kinds than
    hivemind, and either side of a connection chooses the kind of its end. An unreadable one hides
    no others."""
    with contextlib.suppress(Exception):  # the codec of any part may raise anything
        return str(address)
    return None


def remove_stale_sockets() -> int:
    """Remove sockets that dead processes of ours left behind, to which provably nobody is bound.
    Returns how many. hivemind's names for them are random, so they would pile up."""
    try:
        # names are any bytes, and may even have the ends of lines in them
        bound = {*Path("/proc/net/unix").read_bytes().split()}
    except OSError:
        return 0  # without the kernel's list nothing is provable
    removed = 0
    for path in itertools.islice(_FOLDER.glob(_PATTERN), _AT_MOST):
        try:
            if os.fsencode(path) not in bound and _is_old_and_ours(path) and _refuses(path):
                path.unlink()
                removed += 1
        except OSError:
            continue  # another process was faster
    return removed


def _is_old_and_ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > _MINIMUM_AGE_S


def _refuses(path: Path) -> bool:
    """Whether a connection is refused. The kernel's list covers this network namespace only; the
    refusal covers the others."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
