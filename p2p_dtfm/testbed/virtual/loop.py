"""An event loop whose time is moved by what is to happen next.

Nothing waits: where no task can go on, the clock is put to the next timer. What a daemon asks of
its loop besides (jobs in threads, signals, sockets to its own user) ends here as well: a job is
done at once, in this thread, and its result comes after the time that it has said to take.
"""

import asyncio
import collections
import contextvars
import heapq
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from p2p_dtfm.testbed.virtual.process import PROCESS, Process

JOB_NS = 100_000
"""What a job takes of itself."""
BUSY_TIMES, BUSY_JOB_NS = 4, 150_000_000
"""On a machine that does other things, too, it takes so many times as long, and so much more."""
_START_NS = 1_000 * 1_000_000_000
ROUNDING_S = 1e-9
"""What is due so soon is due now: times are sums of fractions of seconds."""
PASSES_LIMIT = 100_000
"""Of all that is ready, in one instant: seeds come to fifteen."""
_IS_OVER = "the world has ended: what ends with it begins nothing any more"


class NothingHappens(Exception):
    """All wait, and nobody for a time: what is waited for never comes."""


class StandsStill(Exception):
    """Somebody goes on and on, and no time passes."""


TAKEN_WITHIN_S = 5.0
"""What a task has raised: whoever began it waits for it, or looks now and then."""


class VirtualTask(asyncio.Task[Any]):
    """Hashed by its number: what walks through a set of tasks does so alike in each run."""

    seen_at: object = None
    """What it waited for when `seeds.watching.nudges` has seen that this is none of its waits."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        loop: "VirtualLoop",
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        self.process: Process | None = PROCESS.get() if context is None else context.get(PROCESS)
        self._number = loop.next_number()  # asyncio, too, keeps all tasks in a set
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number

    __eq__ = object.__eq__

    @property
    def is_untaken(self) -> bool:
        """It has raised something that nobody has heard of."""
        return bool(self._log_traceback)

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
    """Hashed by its number, too. `process`: whose it is."""

    _number = 0
    process: Process | None = None

    def __hash__(self) -> int:
        if not self._number:  # it is asked for the first time: few futures ever are
            loop = self.get_loop()
            assert isinstance(loop, VirtualLoop)
            self._number = loop.next_number()
        return self._number

    __eq__ = object.__eq__


class LoopTurn(asyncio.TimerHandle):
    """A callback in the process that has begun it, as asyncio keeps it: it may be cancelled."""

    __slots__ = ("process",)

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        # in place of its parents': there are a hundred thousand turns in a seed
        self._when = when_s
        self._callback: Callable[..., Any] | None = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self.process: Process | None = context.get(PROCESS)

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = None, ()


@dataclass
class _Job:
    future: asyncio.Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    outcome: object = None
    failure: Exception | None = None


class SocketCalls(Protocol):
    """What answers where a daemon calls a host and a port."""

    async def connect(
        self, make: Callable[[], Any], host: str | None, port: int | None, opening: Any
    ) -> Any:
        """A transport and what `make` has made, over what `opening` has called. Raises
        `OSError`."""

    async def call(self, opening: Any, host: str, port: int) -> None:
        """Raises `OSError`."""


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
        self._passes = 0
        """Since time has moved."""
        self._lanes: dict[Executor, collections.deque[_Job]] = {}
        self._ready: collections.deque[LoopTurn]
        self._later: list[tuple[float, int, LoopTurn]] = []
        """By when they are due, and then in the order in which they were asked for."""
        self._tasks: list[weakref.ref[VirtualTask]] = []
        """Those that were under way at the last look, and all that began since. Nothing is kept:
        who lets go of a task that waits is to be found out."""
        self.sockets: SocketCalls | None = None
        """Who answers what daemons call by sockets of their own, where they do."""
        self._raised: dict[VirtualTask, float] = {}
        """Those that ended with what nobody had taken by the last look, and when that was seen."""
        super().__init__()
        self.set_exception_handler(_note_failure)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self.now_ns / 1e9

    def create_future(self) -> asyncio.Future[Any]:
        future = VirtualFuture(loop=self)
        future.process = PROCESS.get()
        return future

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[Any]:
        task = VirtualTask(coro, loop=self, name=name, context=context)
        self._tasks.append(weakref.ref(task))
        return task

    def tasks(self) -> list[VirtualTask]:
        """What `asyncio.all_tasks` says, in the order in which they began: that one goes through
        the tasks of all worlds, a hundred times as long, and it is asked five times a second."""
        known = [task for it in self._tasks if (task := it()) is not None]
        found = [task for task in known if not task.done()]
        self._tasks = list(map(weakref.ref, found))
        raised = [task for task in (*self._raised, *known) if task.is_untaken]
        self._raised = {task: self._raised.get(task, self.time()) for task in raised}
        return found

    def untaken(self) -> list[str]:
        """What tasks of those that live have raised, and nobody has taken for a while: most are in
        a circle with their own frames, and nobody collects them while a world lasts."""
        self.tasks()
        late = [task for task, at_s in self._raised.items() if self.time() - at_s > TAKEN_WITHIN_S]
        living = [it for it in late if it.process is None or not it.process.is_dead]
        return [f"{it.get_name()}: {it.exception()!r}" for it in living]

    # turns ---------------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if self._closed:  # type: ignore[attr-defined]
            raise RuntimeError(_IS_OVER)
        if context is None:
            context = contextvars.copy_context()
        turn = LoopTurn(0.0, callback, args, context)
        self._ready.append(turn)
        return turn

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if self._closed:  # type: ignore[attr-defined]
            raise RuntimeError(_IS_OVER)
        if context is None:
            context = contextvars.copy_context()
        turn = LoopTurn(when, callback, args, context)
        self._numbers = number = self._numbers + 1
        heapq.heappush(self._later, (when, number, turn))
        return turn

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_ns / 1e9 + delay, callback, *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def again(self, turn: LoopTurn) -> None:
        """A turn that was missed."""
        self._ready.append(turn)

    def _run_once(self) -> None:
        """In place of asyncio's, which runs it again and again: until the loop is to stop. No file
        is looked at, and nothing sleeps."""
        ready, later = self._ready, self._later
        while True:
            if not ready and not self._stopping:  # type: ignore[attr-defined]
                self._go_to_the_next()
            self._passes += 1
            if self._passes > PASSES_LIMIT:
                raise StandsStill(_who_goes_on(ready))
            due_s = self.now_ns / 1e9 + ROUNDING_S
            while later and later[0][0] < due_s:
                ready.append(heapq.heappop(later)[2])
            for _ in range(len(ready)):
                turn = ready.popleft()
                if turn._cancelled:
                    continue
                process = turn.process
                if process is not None and self.now_ns < process.no_turn_until_ns:
                    process.miss(turn)
                    continue
                try:
                    turn._context.run(turn._callback, *turn._args)  # type: ignore[arg-type]
                except Exception as error:  # noqa: BLE001 - what a turn raises ends nothing else
                    turn._context.run(_note_failure, self, _failure(turn, error))
            if self._stopping:  # type: ignore[attr-defined]
                return

    def _go_to_the_next(self) -> None:
        later = self._later
        while later and later[0][2]._cancelled:
            heapq.heappop(later)
        if not later:
            raise NothingHappens
        self.now_ns += -int(-max(0.0, later[0][0] - self.now_ns / 1e9) * 1e9 // 1)
        self._passes = 0

    def close(self) -> None:
        self._later.clear()
        super().close()

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
        process = PROCESS.get()
        is_busy = process is not None and process.is_busy
        return BUSY_TIMES * took_ns + BUSY_JOB_NS if is_busy else took_ns

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

    async def create_connection(  # type: ignore[override]
        self,
        make_protocol: Callable[[], Any],
        host: str | None = None,
        port: int | None = None,
        *,
        sock: Any = None,
        **options: Any,
    ) -> Any:
        if self.sockets is None:
            raise ConnectionRefusedError("nobody listens")
        return await self.sockets.connect(make_protocol, host, port, sock)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        if self.sockets is None:
            raise ConnectionRefusedError("nobody listens")
        await self.sockets.call(sock, *address)


def tasks_here() -> list[VirtualTask]:
    """Of the loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.tasks()


def _who_goes_on(ready: collections.deque[LoopTurn]) -> str:
    """Names nobody where what is ready is over already."""
    for turn in ready:
        if not turn._cancelled:
            owner = getattr(turn._callback, "__self__", None)
            where = owner.waits_at() if isinstance(owner, VirtualTask) else repr(turn._callback)
            name = turn.process.name if turn.process is not None else "the world"
            return f"no time passes, and {name} goes on and on: {where}"
    return "no time passes, and turns that are over come on and on"


def _failure(turn: LoopTurn, error: Exception) -> dict[str, Any]:
    return {"message": f"exception in {turn._callback!r}", "exception": error}


def _note_failure(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Whose future it is counts, not who runs as it is collected: of a killed one's nobody takes
    the outcome, and nobody needs to."""
    owner = getattr(context.get("future"), "process", None)
    process = owner or PROCESS.get()
    if owner is not None and owner.is_dead:
        return
    error = context.get("exception")
    text = f"{context.get('message')}: {error!r}"
    if process is not None:
        process.failures.append(text)
    elif isinstance(loop, VirtualLoop) and error is not None:
        raise error
