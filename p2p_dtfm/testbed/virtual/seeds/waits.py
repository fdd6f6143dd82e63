"""How long each task of each daemon has been at one await: nobody waits longer than is said here.

An await is the future that a task waits for: who looks again and again at what has not come begins
a new one each time, and must have said itself when it stops. Where a task waits for another one,
that one is judged.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from p2p_dtfm.testbed.virtual.loop import VirtualTask
from p2p_dtfm.testbed.virtual.process import Process

LIMIT_S = 60.0
"""More than any deadline of the daemon's; most of them are a few seconds."""
ROOMS = ("p2p_dtfm.daemon.", "p2p_dtfm.net.")
WAITS_FOR_WORK = {
    "node.daemon._until_end": "the daemon, for its end",
    "node.participant.Participant.when_done": "the daemon, for the end of the run",
    "node.coming_and_going.Departure.run_ended": "the daemon, for the end of the run",
    "machine.life.Life.unless_leaving": "whoever looks for a run, for the daemon's end",
    "node.action_loop.ActionLoop.run": "actions of the agreement",
    "node.acquaintances.Acquaintances.keep_remembering": "members that it has not met",
    "node.background.Background._presence_loop": "addresses of its own that are news",
    "peers.messenger.Messenger._next": "messages to one peer",
    "state_transfer.donor.Donor._feed": "news of states for a subscriber",
    "state_transfer.donor.Donor.drain": "the last of its subscribers, which end it",
    "state_transfer.follower.Follower.run": "layers that it lacks",
    "state_transfer.follower.Follower._fetch_offers": "offers of donors",
    "state_transfer.follower.Follower._ask_donors": "layers that no donor has been asked for",
    "streams.frames.read_frame": "the next frame of a stream",
    "streams.wire.StreamWire.read": "the next frame of a stream",
}
"""By place, what it waits for: without a limit, since it holds up nobody who could go on."""


@dataclass
class _Wait:
    future: object
    since_s: float
    """While its process is stopped, time does not count."""


class Waits:
    """Of one seed, looked at now and then."""

    def __init__(self) -> None:
        self._under_way: dict[VirtualTask, _Wait] = {}
        self._looked_s: float | None = None

    def look(self, now_s: float) -> str:
        """Who waits too long, and where; empty where nobody does."""
        before_s = now_s if self._looked_s is None else self._looked_s
        self._looked_s = now_s
        seen: dict[VirtualTask, _Wait] = {}
        found = ""
        for task in asyncio.all_tasks():
            if not isinstance(task, VirtualTask) or task.process is None or task.process.is_dead:
                continue
            future = task._fut_waiter  # type: ignore[attr-defined]
            if future is None or isinstance(future, asyncio.Task):
                continue
            wait = self._under_way.get(task)
            if wait is None or wait.future is not future:
                wait = _Wait(future, now_s)
            elif not task.process.takes_turns:
                wait.since_s += now_s - before_s
            seen[task] = wait
            if now_s - wait.since_s > LIMIT_S:
                found = found or _judge(task, task.process, now_s - wait.since_s)
        self._under_way = seen
        return found


def _judge(task: VirtualTask, process: Process, waited_s: float) -> str:
    place = place_of(task)
    if not place or place in WAITS_FOR_WORK:
        return ""
    return f"{process.name} has waited for {waited_s:.0f} s at {place}: {task.waits_at()}"


def place_of(task: VirtualTask) -> str:
    """Its innermost function that is the daemon's, by module and name; empty where it has none."""
    found = ""
    awaited: Any = task.get_coro()
    while awaited is not None and (frame := getattr(awaited, "cr_frame", None)) is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(ROOMS):
            found = f"{module.split('.', 2)[2]}.{frame.f_code.co_qualname}"
        awaited = getattr(awaited, "cr_await", None)
    return found
