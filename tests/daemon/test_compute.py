"""The compute threads: jobs run in order, end as they should, and nothing of them is kept."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from p2p_dtfm.daemon.machine.compute import Compute, OneThread
from p2p_dtfm.net import event_loop


def test_jobs_run_one_after_the_other_in_a_thread_of_their_own() -> None:
    async def story() -> None:
        compute, done = Compute(), []

        def job(number: int) -> int:
            time.sleep(0.01 * (3 - number))
            done.append((number, threading.get_ident()))
            return number

        assert await asyncio.gather(*(compute.run(job, n) for n in range(3))) == [0, 1, 2]
        assert [number for number, _ in done] == [0, 1, 2]
        (thread,) = {thread for _, thread in done}
        beside = await compute.run_beside(threading.get_ident)
        assert len({thread, beside, threading.get_ident()}) == 3
        assert compute.is_idle and compute.done_count == 4
        compute.close()

    event_loop.run(story())


def test_what_a_job_raises_comes_to_who_waits_and_the_thread_goes_on() -> None:
    async def story() -> None:
        compute = Compute()
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 // 0)
        assert await compute.run(lambda: 7) == 7
        compute.close()

    event_loop.run(story())


def test_the_event_loop_goes_on_while_the_last_job_ends() -> None:
    """The loop stood still for up to a minute. It did not hear a second signal, which has to end a
    daemon at once."""

    async def story() -> None:
        compute, gate, begun = Compute(), threading.Event(), threading.Event()

        def wait() -> bool:
            begun.set()
            return gate.wait(20)

        last = asyncio.create_task(compute.run(wait))
        waits = asyncio.create_task(compute.run(time.sleep, 20))
        assert await asyncio.to_thread(begun.wait, 10)
        ending = asyncio.create_task(compute.end())
        await asyncio.sleep(0.05)
        assert not ending.done() and waits.cancelled()
        gate.set()
        await asyncio.wait_for(ending, 10)
        assert await last

    event_loop.run(story())


def test_a_job_whose_waiter_has_gone_is_not_begun() -> None:
    async def story() -> None:
        compute, gate, begun = Compute(), threading.Event(), []
        first = asyncio.create_task(compute.run(gate.wait))
        second = asyncio.create_task(compute.run(begun.append, 2))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        gate.set()
        assert await first
        await compute.run(begun.append, 3)
        assert begun == [3] and compute.is_idle
        compute.close()

    event_loop.run(story())


def test_closing_ends_the_job_under_way_and_begins_none_of_those_that_wait() -> None:
    async def story() -> None:
        compute, begun = Compute(), []
        jobs = [asyncio.create_task(compute.run(time.sleep, 0.2))]
        jobs += [asyncio.create_task(compute.run(begun.append, 1))]
        await asyncio.sleep(0.05)
        compute.close()
        assert not [one for one in threading.enumerate() if one.name in ("compute", "beside")]
        slept, waiting = await asyncio.gather(*jobs, return_exceptions=True)
        assert slept is None and isinstance(waiting, asyncio.CancelledError) and not begun
        with pytest.raises(RuntimeError):
            await compute.run(begun.append, 2)

    event_loop.run(story())


def test_nothing_of_a_job_is_kept_until_the_next_one() -> None:
    """A job's arguments and its result may be large, and the next job may be long in coming."""

    class Large:
        pass

    async def story() -> None:
        compute = Compute()
        given = Large()
        made = await compute.run(lambda given: Large(), given)
        seen = weakref.ref(given), weakref.ref(made)
        del given, made
        await asyncio.sleep(0.05)
        gc.collect()
        assert [one() for one in seen] == [None, None]
        compute.close()

    event_loop.run(story())


def test_a_thread_ends_with_its_executor() -> None:
    async def story() -> threading.Thread:
        executor = OneThread("left alone")
        await asyncio.get_running_loop().run_in_executor(executor, str)
        return executor._thread

    thread = event_loop.run(story())
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_a_program_that_closes_nothing_ends_and_lets_the_job_under_way_end_first() -> None:
    program = (
        "import asyncio, time\n"
        "from p2p_dtfm.daemon.machine.compute import Compute\n"
        "kept = Compute()\n"
        "async def main():\n"
        "    asyncio.create_task(kept.run(lambda: (time.sleep(0.5), print('done'))))\n"
        "    await asyncio.sleep(0.1)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "done\n" and not ended.stderr
