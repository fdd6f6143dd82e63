"""A time in which a machine takes no part: for what, until when, and what is decided meanwhile."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from p2p_dtfm.daemon.machine.hours import for_a_while, pause_seconds
from p2p_dtfm.daemon.machine.life import RESUMED_S
from p2p_dtfm.daemon.telemetry.status import State, Status
from p2p_dtfm.ports import now


class TimeAway:
    """What is decided while a daemon is away.

    `by_itself`: the time ends once the hours and the owner of the machine allow it. `until_s`: when
    it ends, by the wall clock; a clock that is set back makes it no longer. `on_resumed` is called
    before the user's decision to take part. `on_told_to_leave` is called if the daemon is to end
    after it was decided to take part again.
    """

    def __init__(
        self,
        reason: str,
        by_itself: bool,
        until_s: float | None,
        on_resumed: Callable[[], None],
        on_told_to_leave: Callable[[], None],
    ) -> None:
        self.status = Status()
        self.by_itself = by_itself
        self._reason = reason
        self._until_s, self._lasts_until_s = until_s, 0.0
        self._end_at(until_s)
        self._on_resumed = on_resumed
        self._on_told_to_leave = on_told_to_leave
        self._decision: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def decision(self) -> bool | None:
        """Whether to take part again, or else to end. None while that is open."""
        return self._decision.result() if self._decision.done() else None

    def decide(self, go_on: bool) -> None:
        if not self._decision.done():
            self._decision.set_result(go_on)
        elif not go_on:
            self._on_told_to_leave()

    async def until_decided(self, limit_s: float) -> None:
        """Wait for the decision, for `limit_s` at most."""
        await asyncio.wait({self._decision}, timeout=limit_s)

    async def look_at_the_clock(self) -> None:
        """Resume, or heed the hours again, once `until_s` has come."""
        if self._until_s == RESUMED_S:
            await self.resume()
        elif self._is_over:
            self._until_s, self.by_itself = None, True  # the owner's hours count again
            self._reason = ""  # another reason is to be told

    def _end_at(self, until_s: float | None) -> None:
        self._until_s = until_s
        left_s = 0.0 if until_s is None else until_s - now.wall_s()
        self._lasts_until_s = now.awake_or_asleep_s() + left_s

    @property
    def _is_over(self) -> bool:
        """Whether the time has come, or has passed on a machine whose clock was set back."""
        if self._until_s is None:
            return False
        return now.wall_s() >= self._until_s or now.awake_or_asleep_s() >= self._lasts_until_s

    def begin(self) -> None:
        self.status.say(State.PAUSED, self._reason)

    def goes_on_for(self, reason: str) -> None:
        """Give the reason why the pause goes on. It may be another one than it began for: the
        hours come, and the machine has been on its battery since."""
        if reason != self._reason:
            self.status.say(State.PAUSED, reason)
            self._reason = reason

    # what its user asks for -----------------------------------------------------------------------

    async def resume(self) -> dict[str, Any]:
        self._on_resumed()
        self.decide(True)
        return {"state": "joining"}

    async def leave(self) -> dict[str, Any]:
        self.decide(False)
        return {"state": "stopped"}

    async def pause(self) -> dict[str, Any]:
        self._end_at(None)
        self.by_itself = False
        self.status.say(State.PAUSED, "its user asked for it; p2p-dtfm resume ends it")
        return {"state": "paused"}

    async def pause_for(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        until_s = now.wall_s() + pause_seconds(parameters)
        self._end_at(until_s)
        self.by_itself = False
        self.status.say(State.PAUSED, for_a_while(until_s, now.wall_s()))
        return {"state": "paused"}
