"""Hosts on loopback for the tests of net, and waiting with a deadline."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

from p2p_dtfm.net import event_loop
from p2p_dtfm.net.libp2p.host import Host

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


def run(scenario: Coroutine[Any, Any, None], deadline_s: float = 60.0) -> None:
    """Run a test's coroutine in a loop of its own, as a daemon's."""
    event_loop.run(asyncio.wait_for(scenario, deadline_s))


@contextlib.asynccontextmanager
async def hosts(folder: Path, count: int, all_met: bool = False) -> AsyncIterator[list[Host]]:
    """`count` hosts, all connected to the first, or each to each."""
    started: list[Host] = []
    try:
        for number in range(count):
            first = await started[0].addresses() if started else ()
            host = await Host.start(folder / f"{number}.key", LOOPBACK, initial_peers=list(first))
            for other in started[1:] if all_met else ():
                await host.connect(other.peer_id, await other.addresses(), 5, is_chosen=True)
            started.append(host)
        yield started
    finally:
        await asyncio.gather(*(host.close() for host in started))


async def until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    """Poll a condition; fail with `what` when it does not come true in time."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.01)
