"""An event loop whose time is moved by what is to happen next.

Nothing waits: where no task can go on, the loop puts the clock to the next timer. The loop also
answers what else a daemon asks of it: jobs in threads, signals, and sockets to its own user. It
does a job at once, in this thread, and gives the result after the time that the job says it takes.
"""

import asyncio
import collections
import contextvars
import heapq
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

from p2p_dtfm.testbed.virtual.process import PROCESS, Process
from p2p_dtfm.testbed.virtual.turns import Later, LoopTurn, VirtualFuture, VirtualTask

JOB_NS = 100_000
"""The least time that a job takes."""
BUSY_TIMES, BUSY_JOB_NS = 4, 150_000_000
"""On a machine that does other things too, a job takes so many times as long, and so much more."""
_START_NS = 1_000 * 1_000_000_000
ROUNDING_S = 1e-9
"""A timer that is due within this time is due now: times are sums of fractions of seconds."""
PASSES_LIMIT = 100_000
"""The most passes over all that is ready, within one instant. Seeds need up to fifteen."""
_IS_OVER = "the world has ended: what ends with it begins nothing any more"


class NothingHappens(Exception):
    """All tasks wait, and no timer is set: what they wait for never comes."""


class StandsStill(Exception):
    """Something goes on and on, and no time passes."""


TAKEN_WITHIN_S = 5.0
"""How soon somebody takes what a task has raised: its starter waits for it, or looks now and
then."""


@dataclass
class _Job:
    future: asyncio.Future[Any]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    outcome: object = None
    failure: Exception | None = None


class SocketCalls(Protocol):
    """Answers where a daemon calls a host and a port."""

    async def connect(
        self, make: Callable[[], Any], host: str | None, port: int | None, opening: Any
    ) -> Any:
        """Returns a transport and the protocol of `make`, over the socket `opening`. Raises
        `OSError`."""

    async def call(self, opening: Any, host: str, port: int) -> None:
        """Connects the socket `opening`. Raises `OSError`."""


class _NoServer:
    """A server to which nobody connects."""

    sockets = ()

    def close(self) -> None:
        """Nothing is open."""

    async def wait_closed(self) -> None:
        """Nothing is open."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`now_ns` is the world's time. `job_ns` is how far the job under way has come."""

    def __init__(self) -> None:
        self.now_ns = _START_NS
        self.job_ns = 0
        self.in_job = False
        self._numbers = 0
        self._passes = 0
        """Passes since time last moved."""
        self._lanes: dict[Executor, collections.deque[_Job]] = {}
        self._ready: collections.deque[LoopTurn]
        self._later: list[Later] = []
        """Timers, by when they are due, and then in the order in which they were set."""
        self._tasks: list[weakref.ref[VirtualTask]] = []
        """Tasks that were under way at the last look, and all that began since. The references are
        weak, so that a seed shows if somebody lets go of a task that still waits."""
        self.sockets: SocketCalls | None = None
        """What answers calls through a daemon's own sockets; None: nothing listens."""
        self._raised: dict[VirtualTask, float] = {}
        """Tasks that had raised something that nobody had taken by a look, and when that look
        was."""
        super().__init__()
        self.set_exception_handler(_note_failure)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    @property
    def now_s(self) -> float:
        return self.now_ns / 1e9

    def time(self) -> float:
        """By the clock of the process that asks, which stands still while its machine sleeps."""
        process = PROCESS.get()
        behind_ns = 0 if process is None else process.behind_ns
        return (self.now_ns - behind_ns) / 1e9

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
        """The tasks of `asyncio.all_tasks`, in the order in which they began. That function goes
        through the tasks of all worlds, takes a hundred times as long, and would be called five
        times a second."""
        known = [task for it in self._tasks if (task := it()) is not None]
        found = [task for task in known if not task.done()]
        self._tasks = list(map(weakref.ref, found))
        raised = [task for task in (*self._raised, *known) if task.is_untaken]
        self._raised = {task: self._raised.get(task, self.now_s) for task in raised}
        return found

    def untaken(self) -> list[str]:
        """What tasks of living processes have raised and nobody has taken for a while. Most of
        these tasks are in a circle with their own frames, which nobody collects while a
        world lasts."""
        self.tasks()
        late = [task for task, at_s in self._raised.items() if self.now_s - at_s > TAKEN_WITHIN_S]
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
        """`when` is by the caller's clock. The timer that is returned says when by the world's."""
        process = PROCESS.get()
        if process is not None and process.behind_ns:
            is_to_come = when > self.time()
            when += process.behind_ns / 1e9
            if is_to_come:  # also where the sum is rounded: else that time would never come
                when = max(when, self.now_s + 2 * ROUNDING_S)
        return self._at(when, callback, args, context)

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._at(self.now_ns / 1e9 + delay, callback, args, context)

    def _at(
        self,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> asyncio.TimerHandle:
        if self._closed:  # type: ignore[attr-defined]
            raise RuntimeError(_IS_OVER)
        if context is None:
            context = contextvars.copy_context()
        turn = LoopTurn(when_s, callback, args, context)
        self._numbers = number = self._numbers + 1
        heapq.heappush(self._later, (when_s, number, turn))
        return turn

    def set_aside(self, process: Process) -> list[Later]:
        """Takes the timers of one process out of the loop, and returns them."""
        mine = [it for it in self._later if it[2].process is process]
        self._later[:] = [it for it in self._later if it[2].process is not process]
        heapq.heapify(self._later)
        return mine

    def put_back(self, later: list[Later], duration_ns: int) -> None:
        """Sets these timers again, each so much later and in the old order."""
        for when_s, number, turn in later:
            heapq.heappush(self._later, (when_s + duration_ns / 1e9, number, turn))

    def call_soon_threadsafe(  # type: ignore[override]
        self,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def again(self, turn: LoopTurn) -> None:
        """Does a turn that its process has missed."""
        self._ready.append(turn)

    def _run_once(self) -> None:
        """Replaces asyncio's, which is called again and again: this runs until the loop is to stop.
        It polls no file and never sleeps."""
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
        ahead_ns = -int(-max(0.0, later[0][0] - self.now_ns / 1e9) * 1e9 // 1)
        if ahead_ns:
            self.now_ns += ahead_ns
            self._passes = 0

    def close(self) -> None:
        self._later.clear()
        super().close()

    # jobs ----------------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Each executor does one job at a time. Where none is named, jobs run side by side."""
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
        except Exception as error:  # noqa: BLE001 - whoever waits for the job gets it
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
    """The tasks of the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.tasks()


def _who_goes_on(ready: collections.deque[LoopTurn]) -> str:
    """Who keeps the loop busy. It names nobody where all that is ready was cancelled."""
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
    """Charges a failure to the process that owns the future, not to the one that runs while the
    future is collected. A dead owner's failure is dropped: nobody takes the outcome of a killed
    process."""
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
