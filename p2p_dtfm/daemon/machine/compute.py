"""The thread in which this daemon computes, and one beside it: its event loop stays free."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from p2p_dtfm.ports import now
from p2p_dtfm.train.stage.measure import TorchDevice
from p2p_dtfm.train.stage.stage_runner import StageRunner

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Compute:
    """Torch releases the GIL in its kernels; `busy_ns` counts the time they took in all."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
        self.busy_ns = 0
        self.done_count = 0
        """Grows with each piece of work that is done."""
        self._waiting = 0
        self.stage_runner: Callable[..., StageRunner] = StageRunner
        """What runs a stage here: `stage_runner(spec, layer_states, recompute)`."""
        self.device: TorchDevice | None = None
        """Where a stage's states are while it computes; None: in the host's memory."""

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
        """Run what only touches main memory, and little of it, beside `run`: a sum of gradients
        must not wait until a long backward is through, since other peers wait for it."""
        return await self._run(self._beside, partial(function, *args, **kwargs))

    async def _run(self, executor: ThreadPoolExecutor, function: Callable[[], Result]) -> Result:
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, function)
        finally:
            self._waiting -= 1
            self.done_count += 1

    @property
    def is_idle(self) -> bool:
        """Nothing is computed and nothing waits to be."""
        return self._waiting == 0

    def close(self) -> None:
        for executor in (self._executor, self._beside):
            executor.shutdown(wait=True, cancel_futures=True)
