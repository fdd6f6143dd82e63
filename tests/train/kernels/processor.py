"""The kernels' own source, compiled by the C compiler. A device must give what it gives."""

import ctypes
import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest
from torch import Tensor

from p2p_dtfm.train.kernels.launcher import KERNELS, Argument, source_text

_WORDS = Path(__file__).with_name("words.h").read_text()
_OPTIONS = "-std=gnu11 -O2 -ffp-contract=off -fno-math-errno -Wall -Werror -shared -fPIC -x c"
_SOURCE_OF = {name: source for source, names in KERNELS.items() for name in names}


class ProcessorLauncher:
    """Blocks run one after the other; with `backwards`, they and their threads run from the last
    on."""

    def __init__(self, folder: Path, backwards: bool = False) -> None:
        self._backwards = backwards
        self._libraries = {source: self._compiled(folder, source) for source in KERNELS}

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
        """See `Launcher`."""
        self.launch_raw(kernel, blocks, threads, [_as_argument(each) for each in arguments])

    def launch_raw(self, kernel: str, blocks: int, threads: int, given: list[object]) -> None:
        """Launch with arguments as C takes them."""
        library = self._libraries[_SOURCE_OF[kernel]]
        function = library[kernel]
        order = range(blocks)
        for block in reversed(order) if self._backwards else order:
            library.place(block, blocks, threads)
            function(*given)

    def _compiled(self, folder: Path, source: str) -> ctypes.CDLL:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        text, library = folder / f"{source}.c", folder / f"{source}.so"
        text.write_text(source_text(source, _WORDS))
        order = ["-DBACKWARDS"] if self._backwards else []
        command = [*compiler, *order, *_OPTIONS.split(), str(text), "-o", str(library), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except FileNotFoundError:
            pytest.skip("no C compiler")
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))


def _as_argument(value: Argument) -> object:
    if isinstance(value, Tensor):
        assert value.is_contiguous() and value.device.type == "cpu"
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(0)
    return ctypes.c_longlong(value) if isinstance(value, int) else ctypes.c_float(value)
