"""AdamW and the norm as they are compiled for a processor give the bits of the torch twins."""

import importlib.util
import math
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.kernels import processor
from p2p_dtfm.train.stage.finite import add_if_finite, copy_if_finite, is_finite, is_within
from p2p_dtfm.train.updates.exact_sums import squared_norm
from tests.train.kernels.all_numbers import assert_same, numbers, updated

SOURCE = Path(processor.__file__).with_name("_processor.c")
HERE = torch.device("cpu")
MANY = pytest.param(10_000_019, marks=pytest.mark.nightly)
counts = pytest.mark.parametrize("count", [100_003, MANY])


def built(folder: Path, *options: str) -> ModuleType:
    """The module, built by the machine's own compiler with these options at the end."""
    from hatch_build import OPTIONS

    target = folder / f"_processor{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_path('include')}"
    command = ["cc", *OPTIONS, *options, include, str(SOURCE), "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    if "Python.h" in done.stderr:
        pytest.skip("no headers of Python")
    assert done.returncode == 0, done.stderr
    found = importlib.util.spec_from_file_location("_processor", target)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=[(), ("-mavx512f", "-DNO_CLONES"), ("-O1",)], ids=str)
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if "-mavx512f" in request.param and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("a processor without AVX-512")
    return built(tmp_path_factory.mktemp("processor"), *request.param)


def use(module: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with this module; None stands for the twins."""
    monkeypatch.setattr(processor, "_processor", module)
    processor._is_trusted.cache_clear()


@pytest.fixture(autouse=True)
def _judged_anew_afterwards() -> object:
    yield
    processor._is_trusted.cache_clear()


@counts
def test_adam_w(
    spec: RunSpec, count: int, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(10, count // 20), (7,), (3, 3), (count - count // 20 * 10 - 16,)]
    trained = partial(updated, spec, shapes)
    use(None, monkeypatch)
    by_twin = trained()
    use(module, monkeypatch)
    assert processor.serves(HERE)
    for found, wanted in zip(trained(), by_twin, strict=True):
        assert_same(found, wanted)


@counts
def test_norms(count: int, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    values = numbers(count, 7)
    finite = torch.where(values.isfinite(), values, 0.0)
    parts = [finite[:length] for length in (0, 1, 2, 3, 4, 5, 1000, 65_535, 65_536, 65_537)]
    given = [values, finite, finite * 1e-30, finite[::3], *parts]
    use(None, monkeypatch)
    wanted = torch.tensor([squared_norm(each) for each in given], dtype=torch.float64)
    use(module, monkeypatch)
    assert processor.serves(HERE)
    found = torch.tensor([squared_norm(each) for each in given], dtype=torch.float64)
    assert_same(found, wanted)


@counts
def test_what_is_finite(count: int, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    any_bits, other = numbers(count, 8), numbers(count, 9)
    finite = torch.where(any_bits.isfinite(), any_bits, 0.0)
    small = finite.clamp(-4.0, 4.0)
    one_more = small.clone()
    one_more[-1] = math.nextafter(4.0, 5.0) * (1 + 1e-6)
    given = [any_bits, finite, small, one_more, *(small[:length] for length in (0, 1, 15, 17))]
    given += [torch.cat([small[:100], torch.tensor([bad])]) for bad in (math.nan, -math.inf, 3e38)]
    given += [finite[: count // 2 * 2].view(2, -1).T, finite.double(), finite.bfloat16()]

    def found() -> tuple[list[bool], list[tuple[bool, Tensor]]]:
        said = [is_finite(it) for it in given] + [is_within(it, 4.0) for it in given]
        made = []
        for first, second in ((any_bits, other), (finite, small), (small, small), (small, finite)):
            for at in range(3):
                total = [torch.empty(count), first.clone(), second.clone()][at]
                parts = [first, second, small]
                if at:
                    parts[at - 1] = total
                made.append((add_if_finite(parts, total), total))
            copied = torch.empty(count)
            made.append((copy_if_finite(first, copied), copied))
        return said, made

    use(None, monkeypatch)
    said, made = found()
    assert True in said and False in said
    assert {good for good, _ in made} == {True, False}
    use(module, monkeypatch)
    assert processor.serves(HERE)
    said_so, made_so = found()
    assert said_so == said
    for (good, total), (wanted_good, wanted) in zip(made_so, made, strict=True):
        assert good == wanted_good
        if good:
            assert_same(total, wanted)


def test_one_that_rounds_otherwise_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-ffast-math` itself is not tried: loading it would make zeros of denormals for all tests."""
    if " fma" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("a processor without fused products")
    use(built(tmp_path, "-mfma", "-mavx2", "-DNO_CLONES", "-ffp-contract=fast"), monkeypatch)
    assert not processor.serves(HERE)
    assert math.isfinite(squared_norm(torch.ones(5))), "the twin serves"


def test_what_is_no_array_of_numbers_is_refused(module: ModuleType) -> None:
    good = [numpy.zeros(4, numpy.float32) for _ in range(4)]
    scalars = [0.5] * 8
    module.adam_w(*good, 0, 4, *scalars)
    for place in range(4):
        for bad in (numpy.zeros(4), numpy.zeros(5, numpy.float32), numpy.zeros(4, numpy.int32)):
            with pytest.raises((TypeError, ValueError)):
                module.adam_w(*good[:place], bad, *good[place + 1 :], 0, 4, *scalars)
    for start, end in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(ValueError, match="no part"):
            module.adam_w(*good, start, end, *scalars)
    for bad in (numpy.zeros(4), numpy.zeros(8, numpy.float32)[::2], b"1234", None):
        with pytest.raises((TypeError, ValueError, BufferError)):
            module.squared_norm(bad)
    assert sys.getrefcount(good[0]) == sys.getrefcount(good[1])
