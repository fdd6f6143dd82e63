"""A name for an arithmetic: peers whose arithmetic has the same name compute the same bits."""

import hashlib
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

from p2p_dtfm.train.stage.device.facts import CudaCard
from p2p_dtfm.train.stage.device.repeatable import CUBLAS_SETTING

CPU_INFO = Path("/proc/cpuinfo")
_PROCESSOR_LINES = frozenset(
    {
        *("vendor_id", "cpu family", "model", "model name", "flags", "cache size"),
        *("CPU implementer", "CPU part", "Features"),
    }
)
"""Lines by which libraries choose kernels and cut matrices. ARM's processors have no model name,
and unlike ones have the same features; virtual machines may give all of theirs one name."""
_PROCESSOR_SETTINGS = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "MKL_DEBUG_CPU_TYPE", "OPENBLAS_CORETYPE"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("OMP_THREAD_LIMIT", "OMP_DYNAMIC"),
)
"""Environment variables that choose other kernels than the processor's own, fewer bits in them, or
fewer threads than are asked for."""
_CARD_SETTINGS = (CUBLAS_SETTING, "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def arithmetic_name(device: torch.device) -> str:
    """A name made of the processor, vector unit, torch and how it was built; or of card, driver and
    libraries. Settings by which these compute otherwise are part of it. Whether the device is made
    to repeat its bits at all, its runner says (`StageRunner.repeats_bits`). On a processor the
    number of threads counts as well; it is said with each work."""
    facts = _card(device) if device.type == "cuda" else processor_facts()
    text = "\0".join([str(torch.__version__), *facts])
    return f"{device.type}-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def threads_here(device: torch.device) -> int:
    """Threads of the calling thread, where they matter. A card's bits do not depend on them, and
    its name does not have the number of cores: for it they are 1."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def max_threads() -> int:
    """The most threads with which a peer of this processor's arithmetic is believed to have
    computed: four for each core. So no claim makes an auditor start thousands. The number of cores
    is part of the arithmetic's name."""
    return 4 * (os.cpu_count() or 1)


def threads_believed(threads: int) -> int:
    """The threads that a machine is set to compute with, but at most as many as are believed.
    Nobody would repeat work that was computed with more, and all would find it wrong."""
    return min(threads, max_threads())


def processor_facts() -> list[str]:
    about = [
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        str(os.cpu_count()),
        str(torch.__config__.show()),
        *_said(_PROCESSOR_SETTINGS),
    ]
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [*about, platform.processor()]
    first = text.split("\n\n")[0].splitlines()
    return about + [line for line in first if line.split(":")[0].strip() in _PROCESSOR_LINES]


def _card(device: torch.device) -> list[str]:
    """Facts of a card. Libraries also choose kernels by the number of multiprocessors."""
    card = torch.cuda.get_device_properties(device)
    return [
        str(torch.version.cuda),
        str(torch.backends.cudnn.version()),
        CudaCard(device).driver(),
        card.name,
        f"{card.major}.{card.minor}",
        str(card.multi_processor_count),
        torch.get_float32_matmul_precision(),
        *_said(_CARD_SETTINGS),
    ]


def _said(settings: Iterable[str]) -> list[str]:
    return [os.environ.get(name, "") for name in settings]
