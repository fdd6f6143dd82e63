"""The kernels' source, run by the processor, gives the bits of the torch twins."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import CodecSpec, RunSpec, SparseSpec
from p2p_dtfm.train.codecs import Turn, codec_of
from p2p_dtfm.train.kernels import choice, processor
from p2p_dtfm.train.kernels.known_answer import KNOWN_ANSWER, answer_of
from p2p_dtfm.train.stage.segment_reduction import add_owed, owe
from p2p_dtfm.train.updates.exact_sums import squared_norm
from tests.train.kernels.all_numbers import assert_same, numbers, updated
from tests.train.kernels.processor import ProcessorLauncher

TURN = Turn(place=(1 << 63) + 12345, step=1_000_003)
MANY = pytest.param(10_000_019, marks=pytest.mark.nightly)
counts = pytest.mark.parametrize("count", [100_003, MANY])

UseKernels = Callable[[], None]


@pytest.fixture(autouse=True)
def _by_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a test uses kernels the twins compute, and not the kernels compiled for processors
    either."""
    monkeypatch.setattr(processor, "serves", lambda device: False)


@pytest.fixture
def use_kernels(processor: ProcessorLauncher, monkeypatch: pytest.MonkeyPatch) -> UseKernels:
    def use() -> None:
        monkeypatch.setattr(choice, "launcher_for", lambda device: processor)

    return use


def test_the_numbers_are_of_all_kinds() -> None:
    values = numbers(100_003)
    bits = values.view(torch.int32)
    assert values.isnan().any() and values.isposinf().any() and values.isneginf().any()
    assert ((values.abs() < 1.17e-38) & (values != 0)).sum() > 1000
    assert (bits == 0).any() and (bits == -(1 << 31)).any()


SPARSE = [(1, 100, 4), (3, 30, 1), (3, 30, 2), (5, 60, 8)]


@counts
@pytest.mark.parametrize("name", ["int8", "sign", *SPARSE], ids=str)
def test_codecs(name: str | tuple[int, int, int], count: int, use_kernels: UseKernels) -> None:
    spec = CodecSpec()
    if isinstance(name, tuple):
        spec = CodecSpec(sparse=SparseSpec(one_in=name[0], keep_percent=name[1], bits=name[2]))
    codec = codec_of("sparse" if isinstance(name, tuple) else name, spec)
    values = numbers(count, 1)
    values[:64] = math.inf  # and one block of few other numbers
    payload = bytes(codec.encode(values, TURN))
    decoded = codec.decode(payload, (count,), TURN)
    small = [(n, bytes(codec.encode(values[9000 : 9000 + n], TURN))) for n in range(0, 1100, 61)]
    use_kernels()
    assert bytes(codec.encode(values, TURN)) == payload
    assert_same(codec.decode(payload, (count,), TURN), decoded)
    for length, wanted in small:
        assert bytes(codec.encode(values[9000 : 9000 + length], TURN)) == wanted
        assert codec.decode(wanted, (length,), TURN).shape == (length,)
    broken = bytearray(codec.payload_bytes(count))
    broken[:8] = payload[:4] + b"\0\0\x80\xbf"  # -1, or in two bytes 0 and -1
    if isinstance(name, str) or name[1] == 100:
        with pytest.raises(PeerFault, match="a negative"):
            codec.decode(broken, (count,), TURN)


@counts
def test_adam_w(spec: RunSpec, count: int, use_kernels: UseKernels) -> None:
    shapes = [(10, count // 20), (count - count // 20 * 10,)]
    trained = partial(updated, spec, shapes)
    by_twin = trained()
    use_kernels()
    for found, wanted in zip(trained(), by_twin, strict=True):
        assert_same(found, wanted)


@counts
def test_what_is_owed(count: int, use_kernels: UseKernels) -> None:
    values, decoded = numbers(count, 5), numbers(count, 6)

    def both() -> tuple[Tensor, Tensor]:
        total, owed = values.clone(), torch.empty(count)
        add_owed(total, decoded)
        owe(values, decoded, owed)
        return total, owed

    by_twin = both()
    use_kernels()
    for found, wanted in zip(both(), by_twin, strict=True):
        assert_same(found, wanted)


@counts
def test_norms(count: int, use_kernels: UseKernels) -> None:
    values = numbers(count, 7)
    finite = torch.where(values.isfinite(), values, 0.0)
    given = [values, finite, finite * 1e-30, finite[:1000], finite[:65_537]]
    wanted = torch.tensor([squared_norm(each) for each in given], dtype=torch.float64)
    use_kernels()
    found = torch.tensor([squared_norm(each) for each in given], dtype=torch.float64)
    assert_same(found, wanted)


def test_no_thread_waits_for_an_earlier_one(tmp_path: Path, processor: ProcessorLauncher) -> None:
    here = torch.device("cpu")
    backwards = ProcessorLauncher(tmp_path, backwards=True)
    assert answer_of(processor, here) == answer_of(backwards, here) == KNOWN_ANSWER
