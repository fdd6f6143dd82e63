"""What starts a kernel: a device's (`device_launcher`), or a processor's in the tests."""

from functools import cache
from importlib.resources import files
from typing import Protocol

from torch import Tensor

KERNELS = {
    "adam_w": ("adam_w_step",),
    "feedback": ("feedback_add", "feedback_owe"),
    "int8": ("int8_encode", "int8_decode"),
    "norm": ("norm_lanes", "norm_halve"),
    "sign": ("sign_encode", "sign_decode"),
    "sparse": ("sparse_select", "sparse_pack_marks", "sparse_quantise", "sparse_decode"),
}
"""The kernels of each source."""
COMPILER_OPTIONS = (
    "--std=c++11",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
"""No product and sum are fused; numbers next to zero stay; quotients and roots are rounded to the
nearest. Then each operation gives the bits that IEEE 754 says."""
THREADS = 256
_BLOCKS_LIMIT = 4096

Argument = Tensor | int | float | None


class Launcher(Protocol):
    """Starts kernels where the tensors lie, in the order of the calls."""

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: Argument) -> None:
        """Tensors and None go as pointers, int as `long long`, float as `float`."""


@cache
def text_of(name: str) -> str:
    """The text of a file beside this one."""
    return (files(__package__) / name).read_text("utf-8")


def source_text(source: str, words: str | None = None) -> str:
    """A whole source: with the words of a device, or with `words` in place of them."""
    return "\n".join([words or text_of("words.h"), text_of("numbers.h"), text_of(f"{source}.cu")])


def blocks_for(count: int, each: int = THREADS) -> int:
    """How many blocks share `count` elements, if each block takes `each` of them."""
    return max(1, min(_BLOCKS_LIMIT, -(-count // each)))


def over_elements(launcher: Launcher, kernel: str, count: int, *arguments: Argument) -> None:
    """Start a kernel that goes over `count` elements one by one, if there are any."""
    if count:
        launcher.launch(kernel, blocks_for(count), THREADS, *arguments)
