"""Which event loop daemons run in."""

import asyncio
import signal

import pytest
import uvloop

from p2p_dtfm.net import event_loop


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_daemons_run_in_uvloop() -> None:
    assert isinstance(event_loop.run(_loop()), uvloop.Loop)


def test_who_has_ended_hears_signals_as_before() -> None:
    """uvloop leaves its own signal handlers behind, which do nothing. A program whose threads hang
    at its end could only be killed."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    async def hears() -> None:
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)

    async def fails() -> None:
        await hears()
        raise ValueError

    before = {number: signal.getsignal(number) for number in numbers}
    try:
        event_loop.run(hears())
        assert {number: signal.getsignal(number) for number in numbers} == before
        with pytest.raises(ValueError):
            event_loop.run(fails())
        assert {number: signal.getsignal(number) for number in numbers} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
