"""A page's button is for all devices of a machine. Each device is told, and a refusal is shown."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine import local_client
from p2p_dtfm.daemon.machine.devices import together
from p2p_dtfm.daemon.machine.devices.together import for_all_devices
from p2p_dtfm.daemon.machine.home import DEVICES, Home
from p2p_dtfm.web.api import LocalApi, make_app, refusal_answer

ENDS = UserError("the daemon ends just now: it was told to leave", "start it again")


def pressed(name: str, home: Path) -> Any:
    """The answer to a press of the button `name` on the first device's page."""

    async def own() -> dict[str, str]:
        return {"state": "own"}

    return asyncio.run(for_all_devices(home, {name: own})[name]())


def test_what_another_device_refuses_is_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal was dropped: one of the devices went on, and the page said nothing."""
    homes, told = [tmp_path, tmp_path / "2", tmp_path / "3"], list[Path]()
    present: Sequence[Path] = homes

    def call_daemon(home: Path, name: str, method: str = "GET") -> Any:
        if method == "GET":
            return {"state": "training" if home == homes[1] else "paused"}
        told.append(home)
        if home == homes[1]:
            raise ENDS
        return {"state": "leaving"}

    monkeypatch.setattr(together, "homes_here", lambda home: homes if not told else present)
    monkeypatch.setattr(together, "call_daemon", call_daemon)
    assert pressed("pause", tmp_path) == refusal_answer(ENDS)
    assert sorted(told) == homes[1:], "whatever another one says"
    told.clear()
    present = [homes[0], homes[2]]
    assert pressed("leave", tmp_path) == {"state": "own"}, "it has ended meanwhile"
    told.clear()
    assert pressed("resume", tmp_path) == {"state": "own"}
    assert told == homes[2:], "the other one takes part already"


def test_who_does_not_answer_just_then_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between taking part and a pause a daemon has no socket for a moment; such a device went on.
    The device whose page is pressed waits for nobody: it stayed 20 s more on a machine that its
    owner wanted."""
    other, asked = tmp_path / DEVICES / "2", list[str]()
    other.mkdir(parents=True)
    monkeypatch.setattr(local_client, "holder_of", lambda place: 1)

    async def leave() -> dict[str, str]:
        asked.append("other")
        return {"state": "leaving"}

    async def own() -> dict[str, str]:
        asked.append("own")
        return {"state": "leaving"}

    async def scene() -> None:
        pressing = asyncio.create_task(for_all_devices(tmp_path, {"leave": own})["leave"]())
        await asyncio.sleep(0.3)
        assert asked == ["own"]
        api = LocalApi(make_app({}, {"leave": leave}), Home(other).socket)
        await api.start()
        try:
            assert await pressing == {"state": "leaving"}
        finally:
            await api.close()

    asyncio.run(scene())
    assert asked == ["own", "other"]
