"""Virtual time itself: waiting costs nothing; processes are killed and paused as real ones are."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from p2p_dtfm.ports import chance, now
from p2p_dtfm.testbed.virtual.loop import (
    JOB_NS,
    TAKEN_WITHIN_S,
    NothingHappens,
    StandsStill,
    VirtualLoop,
)
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.wires.links import SECOND_NS, Links

Result = TypeVar("Result")


def within(scene: Callable[[VirtualLoop], Awaitable[Result]]) -> Result:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_coroutine(scene, loop))
    finally:
        loop.close()


async def _coroutine(
    scene: Callable[[VirtualLoop], Awaitable[Result]], loop: VirtualLoop
) -> Result:
    return await scene(loop)


def process_of(loop: VirtualLoop, name: str = "one") -> Process:
    return Process(name, loop, random.Random(name))


def test_an_hour_takes_no_time_and_is_an_hour() -> None:
    async def scene(loop: VirtualLoop) -> None:
        began_ns = loop.now_ns
        order: list[str] = []

        async def wake(name: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for name, after_s in (("late", 3600.0), ("soon", 0.5), ("later", 60.0)):
                group.create_task(wake(name, after_s))
        assert order == ["soon", "later", "late"]
        assert 3600 * SECOND_NS <= loop.now_ns - began_ns < 3600 * SECOND_NS + 1000

    within(scene)


def test_who_goes_on_while_no_time_passes_is_named() -> None:
    async def scene(loop: VirtualLoop) -> None:
        async def spins() -> None:
            while True:
                await asyncio.sleep(0)

        await process_of(loop).begin(spins())

    with pytest.raises(StandsStill, match=r"no time passes, and one goes on and on: .*spins"):
        within(scene)


def test_a_wait_for_nothing_ends_the_world() -> None:
    async def scene(loop: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingHappens):
        within(scene)


def test_in_a_world_that_has_ended_nothing_begins() -> None:
    """Otherwise the cleanup of its garbage would go on in the middle of another world."""
    loop = VirtualLoop()
    loop.close()
    for begin in (loop.call_soon, lambda call: loop.call_later(1.0, call)):
        with pytest.raises(RuntimeError, match="has ended"):
            begin(print)


def test_a_job_takes_the_time_that_it_says_and_jobs_of_one_executor_take_turns() -> None:
    async def scene(loop: VirtualLoop) -> None:
        process = process_of(loop)
        executor = ThreadPoolExecutor(1)

        async def work() -> list[int]:
            began_ns = now.monotonic_ns()

            def job() -> int:
                now.block_ns(SECOND_NS)
                return now.monotonic_ns() - began_ns

            jobs = [loop.run_in_executor(executor, job) for _ in range(2)]
            ends = [await asyncio.wrap_future(job) for job in jobs]
            assert now.monotonic_ns() - began_ns >= ends[-1]
            return ends

        assert await process.begin(work()) == [SECOND_NS + JOB_NS, 2 * (SECOND_NS + JOB_NS)]

    within(scene)


def test_who_is_killed_gets_no_turn_not_even_to_clean_up() -> None:
    async def scene(loop: VirtualLoop) -> None:
        process, seen = process_of(loop), []

        async def work() -> None:
            try:
                await asyncio.sleep(1)
            finally:
                seen.append("cleaned up")

        task = process.begin(work())
        await asyncio.sleep(0.5)
        process.kill()
        task.cancel()
        await asyncio.sleep(5)
        assert not seen and not task.done()
        task._log_destroy_pending = False  # type: ignore[attr-defined]

    within(scene)


def test_who_was_paused_gets_the_turns_that_it_missed_in_their_order() -> None:
    async def scene(loop: VirtualLoop) -> None:
        process, seen = process_of(loop), []

        async def work(number: int) -> None:
            await asyncio.sleep(number)
            seen.append((number, round(now.monotonic_s() - began_s)))

        began_s = loop.time()
        for number in (1, 2, 3, 8):
            process.begin(work(number))
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(3.5)
        assert seen == [(1, 1)]
        process.resume()
        await asyncio.sleep(5)
        assert seen == [(1, 1), (2, 5), (3, 5), (8, 8)]

    within(scene)


def test_each_process_has_its_own_chance_and_outside_is_this_machine() -> None:
    async def scene(loop: VirtualLoop) -> None:
        async def draw() -> list[int]:
            return chance.sample(range(1000), 5)

        first = await process_of(loop, "one").begin(draw())
        assert first == await process_of(loop, "one").begin(draw())
        assert first != await process_of(loop, "other").begin(draw())
        assert now.monotonic_ns() != loop.now_ns

    within(scene)


def test_what_is_sent_into_a_cut_link_arrives_in_its_order_when_it_is_mended() -> None:
    async def scene(loop: VirtualLoop) -> None:
        links, seen = Links(loop, lambda: loop.now_ns, random.Random(1)), []

        def send(number: int) -> None:
            links.carry("a", "b", "it", 100, lambda: seen.append(number))

        for number in range(3):
            send(number)
        links.cut("a", "b")  # with these under way
        send(3)
        await asyncio.sleep(1)
        assert seen == []
        links.mend("a", "b")
        await asyncio.sleep(1)
        assert sorted(seen) == [0, 1, 2, 3] and seen == [0, 1, 2, 3]

    within(scene)


def test_what_nobody_takes_of_what_was_raised_is_told_unless_its_process_is_dead() -> None:
    async def scene(loop: VirtualLoop) -> None:
        async def fail() -> None:
            raise RuntimeError("nobody looks")

        living, dying = process_of(loop, "living"), process_of(loop, "dying")
        kept = [loop.create_task(fail()), living.begin(fail()), dying.begin(fail())]
        await asyncio.sleep(0.1)
        assert not loop.untaken(), "somebody may look yet"
        with pytest.raises(RuntimeError):
            await kept[0]
        dying.kill()
        await asyncio.sleep(TAKEN_WITHIN_S + 0.1)
        (said,) = loop.untaken()
        assert "nobody looks" in said
        assert not loop.untaken(), "it is told once"

    within(scene)
