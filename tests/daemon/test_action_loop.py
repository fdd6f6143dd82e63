"""One action after another, never one within another; what is put off comes in its own turn."""

import asyncio

import pytest

from p2p_dtfm.core.consensus.actions import Left, Report
from p2p_dtfm.daemon.node.action_loop import ActionLoop


def loop_of(done: list[str]) -> ActionLoop:
    loop = ActionLoop()
    loop.handle({Report: lambda action: done.append(action.text)})
    return loop


def test_what_comes_of_an_action_is_done_after_it() -> None:
    done: list[str] = []
    loop = ActionLoop()

    def report(action: Report) -> None:
        if action.text == "first":
            loop.do([Report("of the first")])
        done.append(action.text)

    loop.handle({Report: report})
    loop.do([Report("first"), Report("second")])
    assert done == ["first", "second", "of the first"]


def test_what_is_put_off_is_done_in_order_and_waited_for() -> None:
    done: list[str] = []

    async def scenario() -> None:
        loop = loop_of(done)
        running = asyncio.create_task(loop.run())
        await loop.settled()
        loop.later([Report("put off")])
        assert not done
        await loop.settled()
        assert done == ["put off"]
        loop.later([Report("again")])
        loop.do([Report("after it")])
        assert done == ["put off", "again", "after it"]
        await loop.settled()
        running.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_who_waits_waits_for_what_was_put_off_meanwhile_too() -> None:
    done: list[str] = []

    async def scenario() -> None:
        loop = loop_of(done)
        loop.later([Report("one")])
        waiting = asyncio.create_task(loop.settled())
        await asyncio.sleep(0)
        loop.do([])
        loop.later([Report("two")])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        loop.do([])
        await waiting

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_a_bug_in_what_was_put_off_ends_the_daemon_whoever_came_to_do_it() -> None:
    def fails(action: Left) -> None:
        raise ZeroDivisionError("ours")

    async def scenario() -> None:
        loop = loop_of([])
        loop.handle({Left: fails})
        running = asyncio.create_task(loop.run())
        loop.later([Left()])
        with pytest.raises(ZeroDivisionError):
            loop.do([])  # a message of somebody
        with pytest.raises(ZeroDivisionError):
            await running

    asyncio.run(asyncio.wait_for(scenario(), 5))
