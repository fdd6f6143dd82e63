"""Machines that sleep in virtual time: what stands still with them, and what goes on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.links import SECOND_NS
from p2p_dtfm.testbed.virtual.loop import JOB_NS, VirtualLoop
from p2p_dtfm.testbed.virtual.process import Process
from tests.testbed.test_virtual_loop import process_of, within


async def _sleeps(process: Process, for_s: float) -> None:
    process.fall_asleep()
    await asyncio.sleep(for_s)
    process.wake()


def test_the_clock_of_who_sleeps_stands_still_and_two_others_go_on() -> None:
    async def scene(loop: VirtualLoop) -> None:
        process = process_of(loop)
        before = process.monotonic_ns(), process.awake_or_asleep_ns(), process.wall_ns()
        for _ in range(2):
            await _sleeps(process, 30.0)
        assert process.monotonic_ns() == pytest.approx(before[0], abs=1000)
        assert process.awake_or_asleep_ns() - before[1] == pytest.approx(60e9, abs=1000)
        assert process.wall_ns() - before[2] == pytest.approx(60e9, abs=1000)

        async def reads() -> tuple[float, float, float]:
            return now.monotonic_s(), asyncio.get_running_loop().time(), now.awake_or_asleep_s()

        monotonic_s, loop_s, awake_or_asleep_s = await process.begin(reads())
        assert monotonic_s == loop_s, "asyncio's timers go by it"
        assert awake_or_asleep_s - monotonic_s == pytest.approx(60.0)
        assert loop.time() == loop.now_s == awake_or_asleep_s, "the world's own does not wait"

    within(scene)


def test_timers_come_as_late_as_it_slept_in_their_order_and_those_of_others_in_time() -> None:
    async def scene(loop: VirtualLoop) -> None:
        sleeper, other, seen = process_of(loop), process_of(loop, "other"), list[object]()

        async def waits(name: str, until_s: float) -> None:
            async with asyncio.timeout(60.0):
                await asyncio.sleep(until_s)
            seen.append((name, round(loop.now_s - began_s, 3)))

        async def asks(when_s: float) -> None:
            loop.call_at(when_s, lambda: seen.append(("at", round(loop.now_s - began_s, 3))))

        began_s = loop.now_s
        for name, until_s in (("soon", 1.0), ("later", 3.0), ("long after", 20.0)):
            sleeper.begin(waits(name, until_s))
        other.begin(waits("other", 3.0))
        await asyncio.sleep(0.5)
        await _sleeps(sleeper, 10.0)
        await sleeper.begin(asks((loop.now_ns - sleeper.behind_ns) / 1e9 + 1.0))
        await asyncio.sleep(60.0)
        came = [("other", 3.0), ("soon", 11.0), ("at", 11.5), ("later", 13.0), ("long after", 30.0)]
        assert seen == came

    within(scene)


def test_a_job_under_way_ends_as_much_later() -> None:
    async def scene(loop: VirtualLoop) -> None:
        process, executor = process_of(loop), ThreadPoolExecutor(1)

        async def work() -> list[int]:
            began_ns = loop.now_ns
            jobs = [loop.run_in_executor(executor, now.block_ns, 2 * SECOND_NS) for _ in range(2)]
            ends = list[int]()
            for job in jobs:
                await job
                ends.append(loop.now_ns - began_ns)
            return ends

        task = process.begin(work())
        await asyncio.sleep(1.0)
        await _sleeps(process, 5.0)
        took_ns = 2 * SECOND_NS + JOB_NS
        expected = [took_ns + 5 * SECOND_NS, 2 * took_ns + 5 * SECOND_NS]
        assert await task == pytest.approx(expected, abs=1000)

    within(scene)


def _turn_at(hold: Callable[[VirtualLoop, Process], object], sleeps_at_s: float) -> float:
    """When a turn is taken that came at once, of a process that `hold` holds up, and whose machine
    sleeps for ten seconds from then on."""

    async def scene(loop: VirtualLoop) -> float:
        process, seen = process_of(loop), list[float]()
        began_s = loop.now_s

        async def turn() -> None:
            seen.append(loop.now_s - began_s)

        hold(loop, process)
        process.begin(turn())
        await asyncio.sleep(sleeps_at_s)
        await _sleeps(process, 10.0)
        await asyncio.sleep(60.0)
        return round(seen[0], 3)

    return within(scene)


def test_a_disk_and_a_pause_hold_it_up_besides() -> None:
    def stalls(loop: VirtualLoop, process: Process) -> None:
        process.stall(4 * SECOND_NS)

    def pauses_until(end_s: float) -> Callable[[VirtualLoop, Process], object]:
        def pauses(loop: VirtualLoop, process: Process) -> None:
            process.pause()
            loop.call_later(end_s, process.resume)

        return pauses

    assert _turn_at(stalls, 1.0) == 14.0, "what is left of it comes after the sleep"
    assert _turn_at(stalls, 5.0) == 4.0
    assert _turn_at(pauses_until(3.0), 1.0) == 11.0, "who goes on is still asleep"
    assert _turn_at(pauses_until(15.0), 1.0) == 15.0, "who wakes is still paused"


def test_who_dies_in_its_sleep_wakes_to_nothing() -> None:
    async def scene(loop: VirtualLoop) -> None:
        process, seen = process_of(loop), []

        async def work() -> None:
            await asyncio.sleep(1.0)
            seen.append("went on")

        task = process.begin(work())
        await asyncio.sleep(0.5)
        process.fall_asleep()
        process.kill()
        await asyncio.sleep(5.0)
        process.wake()
        await asyncio.sleep(5.0)
        assert not seen and not process.takes_turns
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    within(scene)
