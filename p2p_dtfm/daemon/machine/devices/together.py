"""What a page's buttons do where several devices of a machine take part for one home."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from p2p_dtfm.daemon.machine.local_client import ask_daemon, homes_here

Action = Callable[[], Awaitable[Any]]


def for_all_devices(home: Path, actions: Mapping[str, Action]) -> dict[str, Action]:
    """The same, told to the other devices' daemons first, as the commands of those names do. On
    the page of one of those others, and where there is one device, they mean that one alone."""
    return {name: _for_all(home, name, own) for name, own in actions.items()}


def _for_all(home: Path, name: str, own: Action) -> Action:
    async def act() -> Any:
        _, *others = homes_here(home)
        if others:
            asked = (asyncio.to_thread(ask_daemon, each, name, "POST") for each in others)
            await asyncio.gather(*asked)
        return await own()

    return act
