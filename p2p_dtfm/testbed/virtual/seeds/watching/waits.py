"""How long each daemon's tasks have been at one await. No task waits longer than
`daemon.dashboard.waits` says, by which a daemon also tells its user."""

import asyncio
from collections.abc import Collection

from p2p_dtfm.daemon.dashboard import waits as of_daemons
from p2p_dtfm.daemon.dashboard.waits import LIMIT_S, WAITS_FOR_WORK, owner_and_place
from p2p_dtfm.testbed.virtual.loop import tasks_here
from p2p_dtfm.testbed.virtual.turns import VirtualTask


class Waits:
    """Watches one seed, now and then."""

    def __init__(self, liars: Collection[str] = ()) -> None:
        """Nothing is asked of `liars`."""
        self._liars = liars
        self._waits = of_daemons.TaskWaits()
        self._looked_s: float | None = None

    def look(self, now_s: float) -> str:
        """Which task waits too long, and where; empty, if none does. While a process is stopped,
        its time does not count."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        tasks = [task for task in tasks_here() if self._is_asked(task)]
        self._waits.look(tasks, passed_s, _takes_turns)
        for task, waited_s in self._waits.longer_than(LIMIT_S):
            place = owner_and_place(task)[1]
            if place and place not in WAITS_FOR_WORK and isinstance(task, VirtualTask):
                assert task.process is not None
                who = task.process.name
                return f"{who} has waited for {waited_s:.0f} s at {place}: {task.waits_at()}"
        return ""

    def _is_asked(self, task: VirtualTask) -> bool:
        process = task.process
        return process is not None and not process.is_dead and process.peer_name not in self._liars


def _takes_turns(task: asyncio.Task[object]) -> bool:
    assert isinstance(task, VirtualTask)
    return task.process is not None and task.process.takes_turns
