"""When a daemon makes way for the owner of its machine, and when it comes back."""

import asyncio
import contextlib
from collections.abc import Callable

import psutil

from p2p_dtfm.daemon.machine.owner.sights import (
    OwnerSight,
    ProcessorUse,
    devices_busy_share,
    is_metered,
    on_battery,
)
from p2p_dtfm.daemon.machine.settings import LOOPBACK, Settings
from p2p_dtfm.ports import now

LOOK_EVERY_S = 5.0
PATIENCE_S = {"battery": 10.0, "metered": 10.0, "busy": 30.0}
"""How long a cause must last. A plug that is pulled for a moment, or a page that loads, is none."""
FREE_FOR_S = 60.0
"""How long nothing may have been in the way before the daemon comes back. Each return costs the
others a new view, and somebody who reads a page will soon turn to the next."""
ALL_THE_SAME = "p2p-dtfm resume takes part all the same"
REASONS = {
    "battery": f"this computer runs on battery; {ALL_THE_SAME}",
    "metered": f"the line of this computer is metered; {ALL_THE_SAME}",
    "busy": f"other programs use this computer; {ALL_THE_SAME}",
}
AT_ONCE = ("battery", "metered")
"""Causes that are known at the first look. What other programs use takes two looks."""


class Yields:
    """Is fed with what was seen, and says why this peer is to be away, if it is."""

    def __init__(
        self, on_battery: bool, on_metered: bool, busy_percent: int, look: Callable[[], OwnerSight]
    ) -> None:
        """`on_battery`, `on_metered`: take part all the same. `busy_percent`: make way for other
        programs that use more; 0: for none. `look` is called in a thread."""
        self._ignores = {"battery": on_battery, "metered": on_metered, "busy": not busy_percent}
        self._busy_share = busy_percent / 100
        self._look = look
        self._since_s: dict[str, float] = {}
        self._seen_s = 0.0
        """When anything was last in the way."""
        self._looked_s: float | None = None
        self._yields_for: str | None = None
        self._is_waived = False

    async def reason(self) -> str | None:
        """Why to be away now; None if nothing is in the way. Looks every few seconds, however often
        it is asked."""
        now_s = now.monotonic_s()
        if self._looked_s is None or now_s - self._looked_s >= LOOK_EVERY_S:
            at_once = self._looked_s is None
            self._looked_s = now_s
            self._judge(await asyncio.to_thread(self._look), now_s, at_once)
        return REASONS[self._yields_for] if self._yields_for else None

    def note_away_for(self, reason: str) -> None:
        """A process before this one has begun to make way, for this reason."""
        named = [name for name, text in REASONS.items() if text == reason]
        if named:
            self._yields_for, self._seen_s = named[0], now.monotonic_s()

    def waive(self) -> None:
        """The owner wants the daemon to take part, until what is in the way now has passed."""
        self._is_waived, self._yields_for = True, None

    def _judge(self, sight: OwnerSight, now_s: float, at_once: bool) -> None:
        present = {
            "battery": sight.on_battery,
            "metered": sight.is_metered,
            "busy": sight.busy_share > self._busy_share,
        }
        causes = [
            name for name, is_there in present.items() if is_there and not self._ignores[name]
        ]
        self._since_s = {name: self._since_s.get(name, now_s) for name in causes}
        if causes:
            self._seen_s = now_s
            lasting = [
                name
                for name, since_s in self._since_s.items()
                if now_s - since_s >= PATIENCE_S[name] or (at_once and name in AT_ONCE)
            ]
            if lasting and not self._is_waived:
                self._yields_for = self._yields_for or lasting[0]
        elif now_s - self._seen_s >= FREE_FOR_S:
            self._is_waived, self._yields_for = False, None


def yields_of(settings: Settings, away_for: str = "") -> Yields | None:
    """The judge of these settings; None where nothing is to be looked at. `away_for`: why a process
    before this one has paused.

    A daemon that listens on loopback alone is somebody's experiment. Its battery and line do not
    matter then. What others use does, if asked for.
    """
    is_experiment = all(address.startswith(LOOPBACK) for address in settings.listen)
    on_power = settings.on_battery or is_experiment
    on_line = settings.on_metered or is_experiment
    if on_power and on_line and not settings.busy_percent:
        return None
    use, looks_at_devices = ProcessorUse(), settings.device != "cpu"

    def look() -> OwnerSight:
        busy = 0.0
        if settings.busy_percent:
            with contextlib.suppress(OSError, psutil.Error):  # not every system tells
                busy = use.share()
            busy = max(busy, devices_busy_share() if looks_at_devices else 0.0)
        return OwnerSight(
            on_battery=not on_power and on_battery(),
            is_metered=not on_line and is_metered(),
            busy_share=busy,
        )

    yields = Yields(on_power, on_line, settings.busy_percent, look)
    yields.note_away_for(away_for)
    return yields
