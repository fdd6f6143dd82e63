"""Who awaits what, and for how long: every wait of a daemon has an owner, a reason and a bound.

Nobody signs a register before it waits, since whoever forgot to would be the one that waits for
ever. Instead the daemon looks at its own tasks now and then. An await is the future that a task
waits for. A task that looks again and again at what has not come begins a new await each time, so
it needs a limit of its own. Where a task waits for another one, that other one is looked at; sleeps
end by themselves.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from p2p_dtfm.ports import now

LIMIT_S = 60.0
"""More than any deadline of the daemon's; most of them are a few seconds."""
LOOKS_EVERY_S = 5.0
TOLD_FROM_S = 5.0
TOLD_LIMIT = 40
STOPPED_S = 3 * LOOKS_EVERY_S
"""A daemon that has not looked for so long was stopped itself: of that time no more than this
counts."""
ROOMS = ("p2p_dtfm.daemon.", "p2p_dtfm.net.")
WAITS_FOR_WORK = {
    "node.daemon._until_end": "the daemon, for its end",
    "node.network._until_lost": "the end of p2pd",
    "node.resident.Resident._leave_once_told": "a word to leave that came before the daemon began",
    "node.participation.end_of_run.EndOfRun.when_done": "the daemon, for the end of the run",
    "node.coming_and_going.departure.Departure.run_ended": "the daemon, for the end of the run",
    "machine.life.Life.unless_leaving": "whoever looks for a run, for the daemon's end",
    "node.action_loop.ActionLoop.run": "actions of the agreement",
    "node.acquaintances.Acquaintances.keep_remembering": "members that it has not met",
    "node.background.presence.PresenceKeeping.keep": "addresses of its own that are news",
    "peers.messenger.Messenger._next": "messages to one peer",
    "proof.of_others.StepsOfOthers.keep": "others that go on without this peer",
    "state_transfer.donor.Donor._feed": "news of states for a subscriber",
    "state_transfer.donor.Donor.drain": "the last of its subscribers, which end it",
    "state_transfer.following.follower.Follower.run": "layers that it lacks",
    "state_transfer.following.follower.Follower._fetch_offers": "offers of donors",
    "state_transfer.following.follower.Follower._ask_donors": (
        "layers that no donor has been asked for"
    ),
    "nat.until_one_ends.until_one_ends": "the end of a connection of others that passes here",
    "streams.frames.read_frame": "the next frame of a stream",
    "streams.wire.StreamWire.read": "the next frame of a stream",
}
"""By place, what is waited for: without a limit, since the wait holds up nobody who could go on."""
WAITS_OF_A_MACHINE = {
    "libp2p.host.Host._watch": "the end of p2pd",
    "libp2p.p2pd.P2pd._drain": "what p2pd writes",
    "direct.line.DirectLine._rest_of": "the next frame of a line, or the rest of one",
    "direct.line.DirectLine.write": "a line to carry what is sent",
    "streams.stripes.Stripe.send": "a line to carry what is sent before it",
    "streams.stripes.Lane.until": "a neighbour to take what it was sent",
    "streams.bulk.to_its_end": "a line to carry what is sent",
    "shared_work.SharedWork.result": "a file that is fetched",
    "state_transfer.following.follower.Follower._fetch": "room for another layer",
    "machine.compute.Compute._run": "work on this machine's device",
    "state_transfer.checkpoints.layer_writes.LayerWrites.unbroken": "this machine's disk",
    "step.reduction.step_reduction.StepReduction._any_final": "the last gradients of a layer",
    "step.reduction.step_reduction.StepReduction._wait_for": "the last gradients of a layer",
    "step.reduction.step_reduction.StepReduction._keep": "the last gradients of a layer",
    "step.mailbox.Mailbox.take": "what a neighbour computes",
    "step.mailbox.Mailbox.wait_for_arrival": "what a neighbour computes",
    "trainer.trainer_state.TrainerState.wait": "what the daemon's state and its reason say",
}
"""What else has no limit, where steps may be long, members few, and p2pd a process of its own.
Seeds are stricter: in them each of these is bounded, or not there."""
SOON = "what others or this machine are to do soon"
WORK_HERE = "work on this machine, in a thread"
OWN_TASKS = "tasks of its own, each of which is looked at"


@dataclass(frozen=True)
class Wait:
    """The longest wait of one owner's tasks at one place."""

    owner: str
    """The daemon's function that the task began with, by module and name."""
    place: str
    """Its innermost function that is the daemon's."""
    reason: str
    """What it waits for."""
    waited_s: float
    limit_s: float | None
    """None: it may wait for as long as it takes."""
    count: int

    @property
    def is_overdue(self) -> bool:
        return self.limit_s is not None and self.waited_s > self.limit_s


@dataclass
class _Await:
    future: object
    waited_s: float = 0.0


class TaskWaits:
    """The waits of some tasks, looked at now and then; call `look` again for what is true now."""

    def __init__(self) -> None:
        self._under_way: dict[asyncio.Task[Any], _Await] = {}

    def look(
        self,
        tasks: Iterable[asyncio.Task[Any]],
        passed_s: float,
        takes_turns: Callable[[asyncio.Task[Any]], bool] = lambda task: True,
    ) -> None:
        """`passed_s`: the time since the last look. It does not count for a task for which
        `takes_turns` is false."""
        seen: dict[asyncio.Task[Any], _Await] = {}
        for task in tasks:
            future = getattr(task, "_fut_waiter", None)
            if future is None or isinstance(future, asyncio.Task):
                continue
            known = self._under_way.get(task)
            if known is None or known.future is not future:
                known = _Await(future)
            elif takes_turns(task):
                known.waited_s += passed_s
            seen[task] = known
        self._under_way = seen

    def longer_than(self, limit_s: float) -> Iterator[tuple[asyncio.Task[Any], float]]:
        """Which tasks, and for how many seconds."""
        for task, known in self._under_way.items():
            if known.waited_s > limit_s:
                yield task, known.waited_s

    def told(self) -> list[Wait]:
        """The longest first, those without a limit last; at most `TOLD_LIMIT`."""
        found: dict[tuple[str, str], Wait] = {}
        for task, waited_s in self.longer_than(TOLD_FROM_S):
            owner, place = owner_and_place(task)
            if not place:
                continue
            before = found.get((owner, place))
            count = 1 if before is None else before.count + 1
            longest_s = waited_s if before is None else max(waited_s, before.waited_s)
            reason = _reason(task, place)
            limit_s = None if reason else LIMIT_S
            found[owner, place] = Wait(owner, place, reason or SOON, longest_s, limit_s, count)
        order = sorted(found.values(), key=lambda it: (it.limit_s is None, -it.waited_s, it.owner))
        return order[:TOLD_LIMIT]


class OwnWaits:
    """The waits of one daemon; `tasks` gives all tasks of its own."""

    def __init__(self, tasks: Callable[[], set[asyncio.Task[Any]]]) -> None:
        self._tasks = tasks
        self._waits = TaskWaits()
        self._looked_s = now.monotonic_s()

    async def keep_looking(self) -> None:
        """Look for as long as the daemon lives."""
        while True:
            self.told()
            await asyncio.sleep(LOOKS_EVERY_S)

    def told(self) -> list[Wait]:
        """The waits as they are now."""
        now_s = now.monotonic_s()
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        self._waits.look(self._tasks(), min(max(0.0, passed_s), STOPPED_S))
        return self._waits.told()

    def overdue(self) -> list[Wait]:
        """Waits that are older than they may be, the longest first."""
        return [wait for wait in self.told() if wait.is_overdue]


def owner_and_place(task: asyncio.Task[Any]) -> tuple[str, str]:
    """A task's outermost and innermost functions that are the daemon's, by module and name. Both
    are empty where it has none, or where it sleeps, which ends by itself."""
    found = list[str]()
    for frame in _frames(task):
        module = str(frame.f_globals.get("__name__", ""))
        if module.startswith(ROOMS):
            found.append(_named(module, frame))
        elif _is_of(frame, "asyncio.tasks", "sleep"):
            return "", ""
    return (found[0], found[-1]) if found else ("", "")


def _reason(task: asyncio.Task[Any], place: str) -> str:
    """Why it may wait without a limit; empty where it may not."""
    if any(_is_of(frame, "asyncio.threads", "to_thread") for frame in _frames(task)):
        return WORK_HERE
    reason = WAITS_FOR_WORK.get(place) or WAITS_OF_A_MACHINE.get(place, "")
    return reason or (OWN_TASKS if _waits_for_tasks(task) else "")


def _waits_for_tasks(task: asyncio.Task[Any]) -> bool:
    """Whether it waits for several tasks, or for one of several. asyncio has a future of its own
    for that, and not the tasks'."""
    future = getattr(task, "_fut_waiter", None)
    together = (("asyncio.tasks", "_wait"), ("asyncio.taskgroups", "__aexit__"))
    return type(future).__name__ == "_GatheringFuture" or any(
        _is_of(frame, *it) for frame in _frames(task) for it in together
    )


def _frames(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames of a task, the outermost first."""
    awaited: Any = task.get_coro()
    while awaited is not None and (frame := getattr(awaited, "cr_frame", None)) is not None:
        yield frame
        awaited = getattr(awaited, "cr_await", None)


def _is_of(frame: FrameType, module: str, name: str) -> bool:
    return frame.f_globals.get("__name__") == module and frame.f_code.co_name == name


def _named(module: str, frame: FrameType) -> str:
    return f"{module.split('.', 2)[2]}.{frame.f_code.co_qualname}"
