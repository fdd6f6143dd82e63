"""Machines whose bits may differ have unlike names; otherwise an honest peer is called a liar."""

from pathlib import Path

import pytest
import torch

from p2p_dtfm.train.stage.replay import arithmetic
from p2p_dtfm.train.stage.replay.arithmetic import arithmetic_name

PROCESSOR = torch.device("cpu")
XEON = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Processor
cpu MHz\t\t: 2600.000
cache size\t: 32768 KB
flags\t\t: fpu sse avx avx2 avx512f

processor\t: 1
"""
RASPBERRY_PI_5 = """\
processor\t: 0
BogoMIPS\t: 108.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp asimdrdm lrcpc dcpop
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 1

processor\t: 1
"""


@pytest.fixture
def name_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`name_on(text)`: the name on a system that says this of its processor."""

    def named(text: str) -> str:
        said = tmp_path / "cpuinfo"
        said.write_text(text, encoding="utf-8")
        monkeypatch.setattr(arithmetic, "CPU_INFO", said)
        return arithmetic_name(PROCESSOR)

    return named


@pytest.mark.parametrize(
    ("said", "other"),
    [
        (RASPBERRY_PI_5, ("0xd0b", "0xd05")),  # four Cortex-A55 with the very same features
        (RASPBERRY_PI_5, ("0x41", "0x61")),
        (XEON, (": 143", ": 207")),  # of a virtual machine, which tells no other name
        (XEON, ("32768 KB", "266240 KB")),  # libraries cut their products by these
        (XEON, ("avx512f", "avx512f amx_tile")),
    ],
)
def test_processors_that_may_compute_otherwise_have_another_name(
    name_on, said: str, other: tuple[str, str]
) -> None:
    assert name_on(said) != name_on(said.replace(*other))


@pytest.mark.parametrize(
    ("said", "other"),
    [(RASPBERRY_PI_5, ("108.00", "120.00")), (XEON, ("2600.000", "3100.123"))],
)
def test_how_fast_one_is_just_now_does_not_count(
    name_on, said: str, other: tuple[str, str]
) -> None:
    assert name_on(said) == name_on(said.replace(*other))


@pytest.mark.parametrize(
    ("setting", "value"),
    [("MKL_ENABLE_INSTRUCTIONS", "AVX2"), ("DNNL_DEFAULT_FPMATH_MODE", "BF16")],
)
def test_settings_by_which_libraries_compute_otherwise_count(
    setting: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(setting, raising=False)
    plain = arithmetic_name(PROCESSOR)
    monkeypatch.setenv(setting, value)
    assert arithmetic_name(PROCESSOR) != plain


def test_another_build_of_the_same_version_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build by another distributor has another library for its products."""
    plain = arithmetic_name(PROCESSOR)
    built = torch.__config__.show().replace("BLAS_INFO=mkl", "BLAS_INFO=open")
    monkeypatch.setattr(torch.__config__, "show", lambda: built + " ")
    assert arithmetic_name(PROCESSOR) != plain
