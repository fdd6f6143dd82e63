"""The thread in which this daemon computes, and one beside it, so that its event loop stays
free."""

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, ParamSpec, TypeVar

from p2p_dtfm.ports import now
from p2p_dtfm.train.stage.measure import TorchDevice
from p2p_dtfm.train.stage.stage_runner import StageRunner

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _ThreadJob(NamedTuple):
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Any]"
    function: Callable[[], Any]


class OneThread(Executor):
    """Runs jobs of an event loop, one after the other. Its futures are the loop's own. A pool's
    have a lock each and are chained to the loop's, at three times the cost of a job."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_ThreadJob | None] = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._is_closed = False
        weakref.finalize(self, _end, self._jobs, self._thread)  # at this program's end, too

    def submit(  # type: ignore[override]
        self, function: Callable[..., Result], /, *args: Any, **kwargs: Any
    ) -> "asyncio.Future[Result]":
        """Call this from the event loop's own thread."""
        if self._is_closed:
            raise RuntimeError("a job for a thread that has ended")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._jobs.put(_ThreadJob(loop, future, partial(function, *args, **kwargs)))
        if self._thread.ident is None:
            self._thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._is_closed = True
        if cancel_futures:
            with suppress(Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job.future.cancel()
        self._jobs.put(None)
        if wait and self._thread.ident is not None:
            self._thread.join()


def _work(jobs: "SimpleQueue[_ThreadJob | None]") -> None:
    while (job := jobs.get()) is not None:
        result, error = None, None
        if not job.future.cancelled():
            try:
                result = job.function()
            except BaseException as raised:  # noqa: BLE001 - whatever it is, its waiter is told
                error = raised
        with suppress(RuntimeError):  # the loop has ended, and its waiters with it
            job.loop.call_soon_threadsafe(_settle, job.future, result, error)
        del job, result, error  # frees what they hold: the next may be long in coming


def _settle(future: "asyncio.Future[Any]", result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _end(jobs: "SimpleQueue[_ThreadJob | None]", thread: threading.Thread) -> None:
    """Wait for the thread's end. A thread that is cut off inside torch takes the whole process with
    it."""
    jobs.put(None)
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join()


class Compute:
    """Runs work in the compute thread. Torch releases the GIL in its kernels. `busy_ns` counts the
    time that the work took in all."""

    def __init__(self) -> None:
        self._executor = OneThread("compute")
        self._beside = OneThread("beside")
        self.busy_ns = 0
        self.done_count = 0
        """Grows with each piece of work that is done."""
        self._counts = threading.Lock()
        self._waiting = 0
        self.stage_runner: Callable[..., StageRunner] = StageRunner
        """What runs a stage here: `stage_runner(spec, layer_states, recompute)`."""
        self.device: TorchDevice | None = None
        """The device of a stage's states while it computes; None: they are in the host's memory."""

    async def run(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Run `function` after all that was given before."""

        def timed() -> Result:
            start_ns = now.monotonic_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self.busy_ns += now.monotonic_ns() - start_ns

        return await self._run(self._executor, timed)

    async def run_beside(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Run work beside `run` that touches main memory alone, and little of it. A sum of
        gradients must not wait for a long backward, since other peers wait for it."""
        return await self._run(self._beside, partial(function, *args, **kwargs))

    async def _run(self, executor: Executor, function: Callable[[], Result]) -> Result:
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, function)
        finally:
            self._waiting -= 1
            self.advanced()

    def advanced(self) -> None:
        """Count a piece of other work as done, in whichever thread. A peer that writes something
        large for others is then seen not to be stuck."""
        with self._counts:
            self.done_count += 1

    @property
    def is_idle(self) -> bool:
        """Whether nothing is computed or waits to be."""
        return self._waiting == 0

    def close(self) -> None:
        for executor in (self._executor, self._beside):
            executor.shutdown(wait=True, cancel_futures=True)

    async def end(self) -> None:
        """As `close`, while the event loop goes on. What is computed now may take a minute, in
        which signals are to be heard."""
        for executor in (self._executor, self._beside):
            executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.close)
