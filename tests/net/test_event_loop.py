"""Which loop daemons run in."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import uvloop

from p2p_dtfm.cli.commands import run as run_command
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.net import event_loop


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_daemons_run_in_uvloop_and_emulated_links_have_finer_timers() -> None:
    assert isinstance(event_loop.run(_loop()), uvloop.Loop)
    assert not isinstance(event_loop.run(_loop(), fine_timers=True), uvloop.Loop)


@pytest.mark.parametrize("shaped", [False, True])
def test_the_daemon_asks_for_fine_timers_where_its_links_are_emulated(
    shaped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def ran(main: Any, *, fine_timers: bool) -> int:
        main.close()
        asked.append(fine_timers)
        return 0

    monkeypatch.setattr(event_loop, "run", ran)
    settings = Settings(home=tmp_path, shape=tmp_path / "shape" if shaped else None)
    assert run_command.run_daemon(settings) == 0
    assert asked == [shaped]


def test_who_has_ended_hears_signals_as_before() -> None:
    """uvloop leaves its own handlers behind, which do nothing: a program whose threads hang at its
    end could only be killed."""
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
