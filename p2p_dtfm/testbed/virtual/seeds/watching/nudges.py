"""Wakes tasks that wait until something changes, although nothing has. A task that then goes on
could have done so before, and nobody had woken it.

Most such waits end anyhow: the next message, or the next view, wakes the same peer. So a missing
wake-up hardly ever shows in what becomes of a run, and always shows here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.turns import VirtualTask

EVERY_S = 0.2
TURNS = 6
"""How many turns of the event loop a woken task has until it waits again. No time passes then."""


@dataclass(frozen=True)
class _Sleeper:
    """A task of a trainer that waits, without a limit, until anything changes."""

    name: str
    task: VirtualTask
    state: TrainerState
    future: object
    place: str

    def waits_on(self) -> bool:
        """Whether it waits in the same place as before."""
        now = None if self.task.done() else _sleeper(self.name, self.task)
        return now is not None and now.place == self.place


class Nudges:
    """Watches one seed. `problem` says who had not been woken, and where it waited."""

    def __init__(self, loop: VirtualLoop, peers: Callable[[], Sequence[Peer]]) -> None:
        """`peers` are those that are watched, if they are there by now."""
        self._loop = loop
        self._peers = peers
        self._slept: dict[VirtualTask, object] = {}
        self._due_s = 0.0
        self.problem = ""

    def look(self) -> None:
        """Wakes those that have slept since the last look."""
        if self._loop.now_s < self._due_s:
            return
        self._due_s = self._loop.now_s + EVERY_S
        sleepers = [it for it in self._sleepers() if not it.state.wake.is_set()]
        woken = [it for it in sleepers if self._slept.get(it.task) is it.future]
        self._slept = {it.task: it.future for it in sleepers}
        for sleeper in woken:
            sleeper.state.wake.set()
        if woken:
            self._after(TURNS, lambda: self._judge(woken))

    def _after(self, turns: int, what: Callable[[], None]) -> None:
        if turns:
            self._loop.call_soon(self._after, turns - 1, what)
        else:
            what()

    def _judge(self, woken: list[_Sleeper]) -> None:
        for sleeper in woken:
            if not sleeper.waits_on():
                self.problem = (
                    f"{sleeper.name} waited at {sleeper.place} at {self._loop.now_s:.2f} s, and "
                    f"went on when it was woken: nobody had (now {sleeper.task.waits_at()})"
                )

    def _sleepers(self) -> list[_Sleeper]:
        names: dict[Process | None, str] = {
            peer.process: peer.name
            for peer in self._peers()
            if peer.is_running and peer.process is not None and peer.process.takes_turns
        }
        found = list[_Sleeper]()
        for task in self._loop.tasks():
            future = task._fut_waiter  # type: ignore[attr-defined]
            if future is not None and task.seen_at is future:
                continue
            name = names.get(task.process)
            if name is None:
                continue
            if (sleeper := _sleeper(name, task)) is not None:
                found.append(sleeper)
            else:  # nor is it a sleeper later, as long as it waits for the same
                task.seen_at = future
        return found


def _sleeper(name: str, task: VirtualTask) -> _Sleeper | None:
    before: FrameType | None = None
    awaited: Any = task.get_coro()
    while awaited is not None and (frame := getattr(awaited, "cr_frame", None)) is not None:
        if frame.f_code is TrainerState.wait.__code__:
            held = frame.f_locals
            if held["limit_s"] is not None:
                return None
            future = task._fut_waiter  # type: ignore[attr-defined]
            place = "" if before is None else f"{before.f_code.co_qualname}:{before.f_lineno}"
            return _Sleeper(name, task, held["self"], future, place)
        before = frame
        awaited = getattr(awaited, "cr_await", None)
    return None
