"""Work for a device, recorded once and started again by one call (CUDA graphs).

A microbatch is some thousand small works for a device, each of which takes the host longer to
start than a fast device to do. Recorded they are started together. What was recorded computes with
the same memory each time: whoever starts it again writes into that memory before.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """Work that can be started again."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Where it is recorded."""

    def room(self) -> Any:
        """Memory for recordings that run one after another, in the order in which they were made:
        what one of them has freed, a later one may use."""

    def record(self, work: Callable[[], None], room: Any) -> Recording:
        """Nothing is computed yet, so what `work` leaves holds no values before the first replay.
        Raises whatever the device cannot record, or has no memory for."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Around work that is of the kind to be recorded later: it leaves nothing behind that a
        recording could not depend on."""


@functools.cache
def recorder_of(device: torch.device) -> "CudaRecorder":
    """One for all of a process: libraries keep room to work in, tens of MiB, for each stream that
    was ever used, and never give it back."""
    return CudaRecorder(device)


class CudaRecorder:
    """CUDA graphs of one device. Other threads may use the device meanwhile, and the recorder's
    stream after one another: whatever comes into it is recorded while anything is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._turn = threading.RLock()
        self._is_broken = False

    def room(self) -> Any:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # that of recordings that are gone is free only then
        return torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None], room: Any) -> Recording:
        if self._is_broken:
            raise RuntimeError("a recording was broken off before")
        graph = torch.cuda.CUDAGraph()
        with self.aside():
            graph.capture_begin(pool=room, capture_error_mode="thread_local")
            try:
                work()
            finally:
                self._is_broken = True  # if it cannot be ended, its room is never given back
                graph.capture_end()
                self._is_broken = False
        return graph

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In a stream of its own, since the default one cannot be recorded; libraries get their
        working memory for it, and autograd its nodes, in passes that are not recorded."""
        usual = torch.cuda.current_stream(self._device)
        with self._turn:
            self._stream.wait_stream(usual)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                usual.wait_stream(self._stream)
