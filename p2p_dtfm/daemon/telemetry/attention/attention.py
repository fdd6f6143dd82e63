"""Looks at what a daemon shows, and tells those that asked to be told."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.telemetry.attention.outbox import Outbox, outbox_of
from p2p_dtfm.daemon.telemetry.attention.watch import LEAST_DISK_BYTES, Watch
from p2p_dtfm.ports import now
from p2p_dtfm.web.state import DashboardState

LOOK_EVERY_S = 5.0


class Attention:
    """There is one for the life of a process: a pause and a return are nothing new to it."""

    def __init__(self, settings: Settings) -> None:
        self._home = settings.home
        self._outbox: Outbox | None = outbox_of(settings)
        self._watch = Watch()

    async def keep_watching(self, state: Callable[[], DashboardState]) -> None:
        """Look now and then, until it is cancelled."""
        while self._outbox is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            await self.look(state())

    async def look(self, state: DashboardState) -> None:
        """Look once, now."""
        if self._outbox is None:
            return
        free_bytes = await asyncio.to_thread(_free_bytes, self._home)
        for notice in self._watch.look(state, free_bytes, now.monotonic_s()):
            self._outbox.send(notice)

    def held_up(self, state: DashboardState, cause: str) -> None:
        """The daemon stays away, for this cause."""
        if self._outbox is not None:
            self._outbox.send(self._watch.held_up(state, cause))

    def ended(self, state: DashboardState, cause: str) -> None:
        """The daemon ends by itself, for this cause."""
        if self._outbox is not None:
            self._outbox.send(self._watch.ended(state, cause))

    async def close(self) -> None:
        if self._outbox is not None:
            await self._outbox.close()


def _free_bytes(home: Path) -> int:
    """Free bytes of the home's disk; plenty where nobody can say."""
    try:
        return shutil.disk_usage(home).free
    except OSError:
        return LEAST_DISK_BYTES
