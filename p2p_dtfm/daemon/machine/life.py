"""The life of one daemon: the tasks that it has begun, and how it comes to its end."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, NoReturn, TypeVar

from p2p_dtfm.core.protocol.errors import UNREACHABLE
from p2p_dtfm.core.protocol.facts.in_words import duration
from p2p_dtfm.ports import now

Result = TypeVar("Result")

ORPHAN_GRACE_S = 15.0
"""A daemon whose parent has died hands its layers over within this time, or ends without."""
STILL_S, LATELY_S = 2.0, 60.0
"""After a standstill of the first length others may take this peer for dead. A rejoin within the
second length after it may be put down to it."""
SERVICE_VARIABLE = "SERVICE_OF_P2P_DTFM"
"""The id of the process that systemd has started. That process sets it for the daemons that it
begins, one for each device."""
AFTER_A_BUG_S = 1.0
FOR_ITS_OWNER = (2, 3, 5)
"""Exit codes after which a service is not begun again. Its owner must see to it, or it is done."""
RESUMED_S = 0.0
"""`pause_until_s` of a daemon that was told to come back while it still left."""

log = logging.getLogger("p2p_dtfm")


class Life:
    """The life of a daemon. `leaving` is set when it is told to go, and `left` when nobody depends
    on it any more. `failed` is set when one of its tasks has failed, with `error`."""

    def __init__(self, on_leaving: Callable[[], None]) -> None:
        self.leaving = asyncio.Event()
        self.left = asyncio.Event()
        self.failed = asyncio.Event()
        self.error: BaseException | None = None
        self.pause_reason: str | None = None
        """Why this peer left, if it is to come back."""
        self.pause_until_s: float | None = None
        """When it is to come back by itself, by the wall clock; None: when it is told to."""
        self._on_leaving = on_leaving
        self.standstill = Standstill()
        self._signalled = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task that lives at most as long as the daemon. Its failure ends the daemon."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None or self.failed.is_set():
            return
        self.error = task.exception()
        self.failed.set()

    def cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def pause(self, reason: str, until_s: float | None = None, *, is_asked: bool = False) -> bool:
        """Leave like any peer, but to come back: `run` ends with `pause_reason` set. Returns
        whether it is a pause; otherwise the daemon leaves for good.

        If it leaves for a pause already, only its user (`is_asked`) changes the reason and the
        time: the user's last word counts.
        """
        is_leaving = self.leaving.is_set()
        if not is_leaving or (is_asked and self.pause_reason is not None):
            self.pause_reason, self.pause_until_s = reason, until_s
        if not is_leaving:
            self._begin_to_leave()
        return self.pause_reason is not None

    def resume(self) -> bool:
        """Come back as soon as the daemon has left, if it still leaves for a pause. Returns whether
        it does."""
        if self.pause_reason is None:
            return False
        self.pause_until_s = RESUMED_S
        return True

    def leave(self) -> None:
        """Leave for good, even if a pause has begun."""
        self.pause_reason = None
        self._begin_to_leave()

    def _begin_to_leave(self) -> None:
        self._on_leaving()
        self.leaving.set()

    async def unless_leaving(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of `work`. None if this peer is told to leave before, which cancels `work`.
        Raises the error of a task of its own that has failed before."""
        working = asyncio.create_task(work)
        ends = [asyncio.create_task(it.wait()) for it in (self.leaving, self.failed)]
        try:
            await asyncio.wait({working, *ends}, return_when=asyncio.FIRST_COMPLETED)
            if self.error is not None and not working.done():
                raise self.error
            return working.result() if working.done() else None
        finally:
            for task in (working, *ends):
                task.cancel()
            await asyncio.gather(working, *ends, return_exceptions=True)

    def handle_signals(self, *, until_stdin_closes: bool) -> None:
        """Leave at the first signal; end at once at the second."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        if ends_with_its_terminal():
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        if until_stdin_closes:
            when_stdin_closes(self._begin_to_leave, ends_after_s=ORPHAN_GRACE_S)

    def _on_signal(self) -> None:
        if self._signalled:
            end_at_once()
        self._signalled = True
        log.info("leaves after this step; a second signal ends at once")
        self.leave()

    def _on_hangup(self) -> None:
        """The terminal is closed. This is no signal of the user's: both the shell and the kernel
        may send it."""
        log.info("its terminal is closed: leaves after this step")
        self.leave()


async def kept_up(watch: Callable[[], Awaitable[None]]) -> None:
    """Repeat `watch` until it returns. A bug costs one look and is logged. If the watch ended,
    nobody would see that the daemon no longer makes way for the machine's owner."""
    while True:
        try:
            return await watch()
        except Exception:
            log.exception("bug while watching over a daemon")
        await asyncio.sleep(AFTER_A_BUG_S)


class Standstill:
    """Whether the machine has let this daemon run. It goes by the clock that goes on while the
    machine sleeps. The wall clock may be set, and the monotonic one stands still as well."""

    def __init__(self) -> None:
        self._seen_s = self._ended_s = now.awake_or_asleep_s()
        self._still_s = 0.0

    def look(self) -> None:
        """Call this all the time. A daemon that has not looked for a while stood still."""
        seen_s, self._seen_s = self._seen_s, now.awake_or_asleep_s()
        still_s = self._seen_s - seen_s
        if self._seen_s > self._ended_s + LATELY_S:
            self._still_s = 0.0
        if still_s > max(STILL_S, self._still_s):
            self._still_s, self._ended_s = still_s, self._seen_s

    def lately(self) -> str:
        """Why others have gone on without this peer, if a standstill explains it; else empty."""
        self.look()
        if not self._still_s:
            return ""
        return (
            f"this program stood still for {duration(self._still_s)}, as where a machine sleeps or "
            "does much else"
        )


def listen_for_the_end(decide: Callable[[bool], None], until_stdin_closes: bool) -> None:
    """Call `decide(False)` at each signal that is to end a process which takes no part."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, decide, False)
    if ends_with_its_terminal():
        loop.add_signal_handler(signal.SIGHUP, decide, False)
    if until_stdin_closes:
        when_stdin_closes(lambda: decide(False))


def ends_with_its_terminal() -> bool:
    """Whether the process ends with its terminal. Under nohup it does not."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def is_begun_by_systemd(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether systemd has started this very process. A program begun in a terminal may have the
    same variable, with the number of the terminal's process."""
    return environment.get("SYSTEMD_EXEC_PID") == str(os.getpid())


def is_a_service(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether nobody reads the log: systemd has started this process, or the process that began
    it."""
    is_of_one = environment.get(SERVICE_VARIABLE) == str(os.getppid())
    return is_of_one or is_begun_by_systemd(environment)


def code_of_what_may_pass() -> int:
    """The exit code where the home or its disk is in the way. systemd begins a service again after
    it: that disk may come later, or be full for an hour."""
    return UNREACHABLE if is_a_service() else 2


def end_at_once() -> NoReturn:
    """An exception would unwind what is just being closed, and print pages about it."""
    log.warning("ends at once")
    logging.shutdown()
    os._exit(130)  # waits for no thread; p2pd ends with this process


def when_stdin_closes(act: Callable[[], None], ends_after_s: float | None = None) -> None:
    """Have the event loop call `act` when stdin closes. End the process after `ends_after_s` more,
    if it is still there."""
    loop = asyncio.get_running_loop()

    def watch() -> None:
        with contextlib.suppress(OSError, ValueError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(act)
            if ends_after_s is not None:
                threading.Event().wait(ends_after_s)
                os._exit(130)

    threading.Thread(target=watch, daemon=True).start()
