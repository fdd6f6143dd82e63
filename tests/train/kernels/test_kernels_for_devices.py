"""Without a device: NVRTC compiles the kernels, and CuPy is asked for the right things."""

import ctypes
import importlib.util
import locale
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from p2p_dtfm.train.kernels import choice
from p2p_dtfm.train.kernels.known_answer import KNOWN_ANSWER, answer_of
from p2p_dtfm.train.kernels.launcher import COMPILER_OPTIONS, KERNELS, source_text
from tests.train.kernels.processor import ProcessorLauncher

BETWEEN = [pytest.param(each, marks=pytest.mark.nightly) for each in (75, 80, 86, 89)]
ARCHITECTURES = [70, *BETWEEN, 90]
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def compiler() -> ctypes.CDLL:
    """NVRTC, of the wheel nvidia-cuda-nvrtc-cu12."""
    try:
        found = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        found = None
    folders = found.submodule_search_locations if found else None
    libraries = [path for folder in folders or () for path in Path(folder).glob("lib/libnvrtc.so*")]
    if not libraries:
        pytest.skip("nvidia-cuda-nvrtc-cu12 is not installed")
    return ctypes.CDLL(str(libraries[0]))


def compiled(compiler: ctypes.CDLL, source: str, architecture: int) -> str:
    """PTX; the machine code is made as well."""
    program = ctypes.c_void_p()
    text = source_text(source).encode()
    assert not compiler.nvrtcCreateProgram(
        ctypes.byref(program), text, f"{source}.cu".encode(), 0, None, None
    )
    options = [*COMPILER_OPTIONS, f"--gpu-architecture=sm_{architecture}"]
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = compiler.nvrtcCompileProgram(program, len(options), given)
    ptx = _output(compiler, program, "PTX")
    assert not failed, _output(compiler, program, "ProgramLog")
    size = ctypes.c_size_t()
    assert not compiler.nvrtcGetCUBINSize(program, ctypes.byref(size)) and size.value > 1000
    assert not compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx


def _output(compiler: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(compiler, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    getattr(compiler, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", KERNELS)
def test_all_architectures_are_compiled_for_and_nothing_is_fused(
    source: str, architecture: int, compiler: ctypes.CDLL
) -> None:
    before = locale.getencoding()
    with ThreadPoolExecutor(max_workers=1) as beside:  # `DeviceLauncher` does so, and says why
        ptx = beside.submit(compiled, compiler, source, architecture).result()
    assert locale.getencoding() == before
    for name in KERNELS[source]:
        assert f".entry {name}(" in ptx
    for inexact in ("fma.", "mad.f", ".ftz", ".approx", "rcp.", "div.full"):
        assert inexact not in ptx, inexact
    due = {"adam_w": ("div.rn.f32", "sqrt.rn.f32"), "int8": ("div.rn.f32", "cvt.rni.f32.f32")}
    assert all(operation in ptx for operation in due.get(source, ()))


class FakeCuPy:
    """Takes what CuPy takes, and lets the processor run it."""

    def __init__(self, processor: ProcessorLauncher) -> None:
        self._processor = processor
        self.streams: set[tuple[int, int]] = set()
        self.cuda = SimpleNamespace(
            Device=self._context,
            ExternalStream=self._stream,
            compiler=SimpleNamespace(compile_using_nvrtc=self._compile),
            function=SimpleNamespace(Module=lambda: _Module(self._function)),
        )

    def _compile(self, code: str, options: tuple[str, ...]) -> tuple[bytes, object]:
        assert options == COMPILER_OPTIONS
        assert code in [source_text(source) for source in KERNELS]
        return code.encode(), None

    def _function(self, name: str) -> Any:
        def call(grid: tuple[int], block: tuple[int], arguments: tuple[numpy.generic, ...]) -> None:
            self._processor.launch_raw(name, grid[0], block[0], [_of_numpy(a) for a in arguments])

        return call

    def _context(self, index: int) -> Any:
        assert index == 0
        return _Context()

    def _stream(self, pointer: int, index: int) -> Any:
        self.streams.add((pointer, index))
        return _Context()


class _Module:
    def __init__(self, function: Any) -> None:
        self._function = function
        self._binary = b""

    def load(self, binary: bytes) -> None:
        self._binary = binary

    def get_function(self, name: str) -> Any:
        assert name.encode() in self._binary
        return self._function(name)


class _Context:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _of_numpy(value: numpy.generic) -> object:
    assert value.dtype in (numpy.uint64, numpy.int64, numpy.float32)
    return numpy.ctypeslib.as_ctypes_type(value.dtype)(value.item())


@pytest.fixture
def cupy(processor: ProcessorLauncher, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuPy]:
    fake = FakeCuPy(processor)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.delitem(sys.modules, "p2p_dtfm.train.kernels.device_launcher", raising=False)
    yield fake
    sys.modules.pop("p2p_dtfm.train.kernels.device_launcher", None)


def test_cupy_is_asked_for_the_kernels_in_torchs_stream(cupy: FakeCuPy) -> None:
    from p2p_dtfm.train.kernels.device_launcher import DeviceLauncher

    launcher = DeviceLauncher(CUDA)
    assert answer_of(launcher, torch.device("cpu")) == KNOWN_ANSWER
    assert cupy.streams == {(77, 0)}


def test_numbers_next_to_zero_must_stay(processor: ProcessorLauncher) -> None:
    """An H200 gave this answer while CuPy added an option of its own, which makes zeros of such
    numbers."""

    class Flushing:
        def launch(self, *given: Any) -> None:
            torch.set_flush_denormal(True)
            try:
                processor.launch(*given)
            finally:
                torch.set_flush_denormal(False)

    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot make zeros of them")
    assert answer_of(Flushing(), torch.device("cpu")) == "d9677ed66f2a0e9c90e64c1d274ee4e7"


def test_without_cupy_or_with_other_bits_the_twins_serve(
    cupy: FakeCuPy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    choose = choice.launcher_for.__wrapped__
    monkeypatch.setattr(choice, "answer_of", lambda launcher, device: KNOWN_ANSWER)
    assert choose(CUDA) is not None and not caplog.records
    assert choose(torch.device("cpu")) is None
    monkeypatch.setattr(choice, "answer_of", lambda launcher, device: "another")
    assert choose(CUDA) is None
    assert "other bits" in caplog.text
    monkeypatch.setattr(cupy.cuda, "compiler", None)
    assert choose(CUDA) is None
    assert "no kernels on cuda:0" in caplog.text
    monkeypatch.setitem(sys.modules, "cupy", None)
    del sys.modules["p2p_dtfm.train.kernels.device_launcher"]  # for good: it holds the fake
    caplog.clear()
    assert choose(CUDA) is None and not caplog.records
