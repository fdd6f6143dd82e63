"""A pause begins: what else may come, or fail, until the small program waits in the daemon's
place."""

import asyncio
import errno
import logging
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.cli.commands import run
from p2p_dtfm.daemon.dashboard.dashboard_host import stored_token
from p2p_dtfm.daemon.machine.away import StepAside
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.resident import Resident
from tests.daemon.test_residents import EVER, Acting, Staged, away_in, while_paused


@pytest.mark.parametrize("is_told", [False, True])
def test_who_is_told_to_end_while_its_pause_begins_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """The daemon that listened to signals was gone, and the small program did not run yet: the
    process stayed paused. systemd waited for a quarter of an hour, and killed it."""
    placed: list[str] = []

    async def pauses(daemon: Acting) -> int:
        Life(lambda: None).handle_signals(until_stdin_closes=False)
        daemon.pause_reason = "asked for"
        return 0

    async def closes() -> None:
        if is_told:
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)

    def takes_place(pause: StepAside) -> None:
        placed.append(pause.away.reason)
        raise SystemExit(0)

    monkeypatch.setattr(StepAside, "take_place", takes_place)
    settings = Settings(home=tmp_path, run="tiny", **EVER)
    resident = Staged(settings, (pauses,))
    resident._steps_aside = True
    monkeypatch.setattr(resident._attention, "close", closes)
    if is_told:
        assert run._to_the_end(resident, settings, logging.StreamHandler()) == 0
    else:
        with pytest.raises(SystemExit):
            run._to_the_end(resident, settings, logging.StreamHandler())
    assert placed == ([] if is_told else ["asked for"])


def test_a_full_disk_ends_nobodys_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small program wrote the dashboard's page anew and ended where the disk did not take it,
    with a code after which no service is begun again."""
    stored_token(tmp_path / "dashboard.token")
    opens = os.open

    def full(path: Any, *more: Any, **named: Any) -> int:
        if str(path).endswith("dashboard.html"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opens(path, *more, **named)

    async def look(resident: Resident) -> None:
        told = await asyncio.to_thread(call_daemon, tmp_path, "dashboard")
        assert told["page"] is None and "#token=" in told["address_with_token"]
        assert (await asyncio.to_thread(call_daemon, tmp_path, "status"))["state"] == "paused"
        await resident._dashboard.close()

    away = away_in(tmp_path, {})
    monkeypatch.setattr(os, "open", full)
    settings = away.settings | {"dashboard": "auto"}
    while_paused(tmp_path, msgspec.structs.replace(away, settings=settings), look)
