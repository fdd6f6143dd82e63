"""Work for a device, recorded once and started again by one call (CUDA graphs).

A microbatch is some thousand small works for a device. Starting one takes the host longer than a
fast device needs to do it. Recorded works are started together. A recording computes with the same
memory each time: whoever starts it again writes into that memory before.
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
    """Records work for a device."""

    def room(self) -> Any:
        """Memory for recordings that run one after another, in the order in which they were made: a
        later one may use what an earlier one has freed."""

    def record(self, work: Callable[[], None], room: Any) -> Recording:
        """Record `work` without computing it: what it leaves holds no values before the first
        replay. Raises whatever the device raises for work that it cannot record or has no memory
        for."""

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Around work of a kind that is to be recorded later. It leaves nothing behind on which a
        recording could not depend."""


@functools.cache
def recorder_of(device: torch.device) -> "CudaRecorder":
    """The one recorder of a process. Libraries keep memory to work in, tens of MiB, for each stream
    that was ever used, and never give it back."""
    return CudaRecorder(device)


class CudaRecorder:
    """CUDA graphs of one device. Other threads may use the device meanwhile, and the recorder's
    stream one after another: whatever is started in it during a recording is recorded."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._turn = threading.RLock()
        self._is_broken = False

    def room(self) -> Any:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # only this frees the memory of recordings that are gone
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
                self._is_broken = True  # a recording that cannot be ended never gives its room back
                graph.capture_end()
                self._is_broken = False
        return graph

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """In a stream of its own, since the default one cannot be recorded. In passes that are not
        recorded libraries get their working memory for the stream, and autograd its nodes."""
        usual = torch.cuda.current_stream(self._device)
        with self._turn:
            self._stream.wait_stream(usual)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                usual.wait_stream(self._stream)
