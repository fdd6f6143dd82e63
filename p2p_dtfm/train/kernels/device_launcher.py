"""Kernels on a CUDA device, compiled and started by CuPy, in PyTorch's own stream."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy
import numpy
import torch
from torch import Tensor

from p2p_dtfm.train.kernels.launcher import COMPILER_OPTIONS, KERNELS, Argument, source_text


class DeviceLauncher:
    """Compiles all sources at once, so that a source which fails does so before a step.

    Raises what CuPy raises.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        # NVRTC leaves the thread that calls it with another locale: text files would be ASCII
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compiler") as beside:
            self._functions = beside.submit(self._compiled).result()

    def _compiled(self) -> dict[str, Any]:
        functions: dict[str, Any] = {}
        with cupy.cuda.Device(self._index):
            for source, names in KERNELS.items():
                # not `RawModule`, which adds -ftz=true behind the options that it is given
                given = (source_text(source), COMPILER_OPTIONS)
                binary, _ = cupy.cuda.compiler.compile_using_nvrtc(*given)
                module = cupy.cuda.function.Module()
                module.load(binary)
                functions |= {name: module.get_function(name) for name in names}
        return functions

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
        """See `Launcher`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        given = tuple(map(as_argument, arguments))
        with cupy.cuda.Device(self._index), cupy.cuda.ExternalStream(stream, self._index):
            self._functions[kernel]((blocks,), (threads,), given)


def as_argument(value: Argument) -> numpy.generic:
    """The value as CuPy passes it on unchanged: eight bytes, or four for a float."""
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return numpy.uint64(value.data_ptr())
    if value is None:
        return numpy.uint64(0)
    return numpy.int64(value) if isinstance(value, int) else numpy.float32(value)
