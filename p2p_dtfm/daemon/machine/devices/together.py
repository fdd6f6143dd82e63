"""What a page's buttons do where several devices of a machine take part for one home."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.local_client import call_daemon, homes_here
from p2p_dtfm.web.api import refusal_answer

Action = Callable[[], Awaitable[Any]]


def for_all_devices(home: Path, actions: Mapping[str, Action]) -> dict[str, Action]:
    """The actions, told to the other devices' daemons as well, as the commands of those names do.
    None waits for another. If one of them refuses, its reason is the answer.

    On the page of one of those other daemons, or where there is one device, an action means that
    daemon alone.
    """
    return {name: _for_all(home, name, own) for name, own in actions.items()}


def _for_all(home: Path, name: str, own: Action) -> Action:
    async def act() -> Any:
        _, *others = homes_here(home)
        asked = (asyncio.to_thread(_refusal, it, name) for it in others)
        answer, *told = await asyncio.gather(own(), *asked)
        present = homes_here(home) if any(told) else ()  # a daemon that has ended refuses nothing
        refused = [why for it, why in zip(others, told, strict=True) if why and it in present]
        is_refused = isinstance(answer, dict) and "error" in answer
        return refusal_answer(refused[0]) if refused and not is_refused else answer

    return act


def _refusal(home: Path, name: str) -> UserError | None:
    """Tell a daemon something; returns why it refuses, or None. One that does not answer just now,
    as it begins or ends a pause, is waited for. One that is not paused is not told to resume, as
    with the command."""
    try:
        if name != "resume" or call_daemon(home, "status")["state"] in ("paused", "leaving"):
            call_daemon(home, name, "POST")
    except UserError as error:
        return error
    return None
