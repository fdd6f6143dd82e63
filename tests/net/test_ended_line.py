"""A direct line ends in the very moment in which a call begins to wait for it."""

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from p2p_dtfm.net import event_loop
from p2p_dtfm.net.direct.line import AT_ONCE_BYTES, DirectLine

Begin = Callable[[DirectLine], Awaitable[object]]


class EndsFirst(DirectLine):
    """A line whose thread ends after the job was put into the queue, and before the thread is
    woken."""

    ends = False

    def _ring(self) -> bool:
        if self.ends:
            self._closing = True
            super()._ring()
            self._thread.join(5)
            assert not self._thread.is_alive()
        return super()._ring()


async def _begun_too_late(begin: Begin) -> list[dict[str, Any]]:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        line = EndsFirst(cast(Any, ours), 5.0, lambda: None)
        line.ends = True
        with pytest.raises(ConnectionResetError):
            await begin(line)
        await asyncio.sleep(0.01)
    return unheard


@pytest.mark.parametrize(
    "begin",
    [
        lambda line: line.write([bytes(AT_ONCE_BYTES + 1)]),
        lambda line: line.read_into(memoryview(bytearray(AT_ONCE_BYTES + 1))),
    ],
    ids=["write", "read"],
)
def test_who_is_told_at_once_leaves_nothing_unheard(begin: Begin) -> None:
    unheard = event_loop.run(_begun_too_late(begin))
    gc.collect()
    assert unheard == []
