"""An event loop whose time is moved by what is to happen next.

Nothing waits: where no task can go on, the clock is put to the next timer. What a daemon asks of
its loop besides (jobs in threads, signals, sockets to its own user) ends here as well: a job is
done at once, in this thread, and its result comes after the time that it has said to take.
"""

import asyncio
import collections
import contextvars
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_dtfm.testbed.virtual.process import PROCESS, Process, Turn

JOB_NS = 100_000
"""What a job takes of itself."""
_START_NS = 1_000 * 1_000_000_000


class NothingHappens(Exception):
    """All wait, and nobody for a time: what is waited for never comes."""


class VirtualTask(asyncio.Task[Any]):
    """Hashed by its number: what walks through a set of tasks does so alike in each run."""

    def __init__(self, *args: Any, loop: "VirtualLoop", **options: Any) -> None:
        self._number = loop.next_number()
        context = options.get("context")
        self.process: Process | None = PROCESS.get() if context is None else context.get(PROCESS)
        super().__init__(*args, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    __eq__ = object.__eq__

    def waits_at(self) -> str:
        """Its innermost functions, the last one first."""
        places = []
        awaited: Any = self.get_coro()
        while awaited is not None and (frame := getattr(awaited, "cr_frame", None)) is not None:
            module = Path(frame.f_code.co_filename).stem
            places.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
            awaited = awaited.cr_await
        return " < ".join(reversed(places))


class VirtualFuture(asyncio.Future[Any]):
    """Hashed by its number, too."""

    def __init__(self, *, loop: "VirtualLoop") -> None:
        self._number = loop.next_number()
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number

    __eq__ = object.__eq__


class _Selector(selectors.SelectSelector):
    """Sees no file, and never sleeps."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise NothingHappens
        self.loop.now_ns += -int(-timeout * 1e9 // 1)
        return []


@dataclass
class _Job:
    future: asyncio.Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    outcome: object = None
    failure: Exception | None = None


class _NoServer:
    """Nobody connects."""

    sockets = ()

    def close(self) -> None:
        """Nothing is open."""

    async def wait_closed(self) -> None:
        """Nothing is open."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now_ns` is the time of all; `job_ns` is how far the job that is being done has come."""

    def __init__(self) -> None:
        self.now_ns = _START_NS
        self.job_ns = 0
        self.in_job = False
        self._numbers = 0
        self._lanes: dict[Executor, collections.deque[_Job]] = {}
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9
        self.set_task_factory(lambda loop, coroutine, **options: VirtualTask(
            coroutine, loop=self, **options
        ))  # fmt: skip
        self.set_exception_handler(_note_failure)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self.now_ns / 1e9

    def create_future(self) -> asyncio.Future[Any]:
        return VirtualFuture(loop=self)

    # turns ---------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        process = context.get(PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        turn = Turn(process, callback, args)
        turn.context = context
        turn.handle = super().call_soon(turn, context=context)
        return turn.handle

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        process = context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        turn = Turn(process, callback, args)
        turn.context = context
        turn.handle = handle = super().call_at(when, turn, context=context)
        return handle

    def again(self, turn: Turn) -> None:
        """A turn that was missed."""
        if turn.handle is None or not turn.handle.cancelled():
            super().call_soon(turn, context=turn.context)

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    # jobs ----------------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """One job at a time in each executor; as many as there are where none is named."""
        job = _Job(self.create_future(), function, args)
        if executor is None:
            self._do(job, None)
        else:
            lane = self._lanes.setdefault(executor, collections.deque())
            lane.append(job)
            if len(lane) == 1:
                self._do(job, lane)
        return job.future

    def _do(self, job: "_Job", lane: collections.deque["_Job"] | None) -> None:
        took_ns = 0 if job.future.cancelled() else self._time_of(job)
        self.call_later(took_ns / 1e9, self._end, job, lane)

    def _time_of(self, job: "_Job") -> int:
        self.job_ns, self.in_job = JOB_NS, True
        try:
            job.outcome = job.function(*job.args)
        except Exception as error:  # noqa: BLE001 - for whoever waits for the job
            job.failure = error
        took_ns, self.job_ns, self.in_job = self.job_ns, 0, False
        return took_ns

    def _end(self, job: "_Job", lane: collections.deque["_Job"] | None) -> None:
        if not job.future.done():
            if job.failure is None:
                job.future.set_result(job.outcome)
            else:
                job.future.set_exception(job.failure)
        if lane is not None:
            lane.popleft()
            if lane:
                self._do(lane[0], lane)

    # what belongs to a machine -------------------------------------------------------------------

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., Any], *args: Any
    ) -> None:
        """Nobody sends a signal."""

    def remove_signal_handler(self, sig: int) -> bool:
        return False

    async def create_server(self, *args: Any, **options: Any) -> Any:
        return _NoServer()


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    process = PROCESS.get()
    error = context.get("exception")
    text = f"{context.get('message')}: {error!r}"
    if process is not None:
        process.failures.append(text)
    elif isinstance(loop, VirtualLoop) and error is not None:
        raise error
