"""Waits for shaped links, in uvloop, whose own timers are in whole milliseconds."""

import asyncio
import gc
import os
import statistics

from p2p_dtfm.net.shaping.fine_timer import until
from p2p_dtfm.ports import now
from tests.net.net_support import run


def test_a_wait_ends_within_a_fraction_of_a_millisecond_of_its_time_and_never_before() -> None:
    async def scenario() -> None:
        late_s = []
        for tenths in range(1, 60):
            at_s = now.monotonic_s() + tenths / 10_000
            await until(at_s)
            late_s.append(now.monotonic_s() - at_s)
        assert min(late_s) >= -0.0001
        assert statistics.median(late_s) < 0.0004

    run(scenario())


def test_many_wait_at_once_and_go_in_order_whoever_gives_up() -> None:
    async def scenario() -> None:
        began_s, gone = now.monotonic_s(), []

        async def wait(number: int) -> None:
            await until(began_s + 0.02 + number / 1000)
            gone.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in reversed(range(30))]
        await asyncio.sleep(0.001)
        for number in (0, 7, 29):
            tasks[29 - number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gone == [number for number in range(30) if number not in (0, 7, 29)]
        await until(now.monotonic_s() - 1)  # this time has passed: no wait
        await until(now.monotonic_s() + 0.001)  # and the timer goes on

    run(scenario())


def test_a_loop_that_is_gone_has_left_no_descriptor() -> None:
    async def uses_one() -> None:
        await until(now.monotonic_s() + 0.001)

    async def ends_while_somebody_waits() -> None:
        """Waiting tasks are cancelled, as a daemon's calls and streams are."""
        waits = [asyncio.create_task(until(now.monotonic_s() + 60 + n)) for n in range(5)]
        await uses_one()
        for wait in waits[::2]:
            wait.cancel()
        await asyncio.sleep(0)

    gc.collect()  # of other tests
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        run(uses_one())
        run(ends_while_somebody_waits())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
