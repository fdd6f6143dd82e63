"""What computes the same bits has the same name."""

import hashlib
import os
import platform
from pathlib import Path

import torch

from p2p_dtfm.train.stage.device.facts import CudaCard
from p2p_dtfm.train.stage.device.repeatable import CUBLAS_SETTING

_PROCESSOR_LINES = ("model name", "flags", "Features")


def arithmetic_name(device: torch.device) -> str:
    """Of processor, vector unit and torch, or of card, driver and libraries; whether the device is
    made to repeat its bits at all, its runner says (`StageRunner.repeats_bits`). The number of
    threads counts on a processor as well, and is said with each work."""
    facts = _card(device) if device.type == "cuda" else _processor()
    text = "\0".join([str(torch.__version__), *facts])
    return f"{device.type}-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def threads_here(device: torch.device) -> int:
    """Of the thread that asks, where they matter: a card's bits do not depend on them, nor is the
    number of cores in its name."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def max_threads() -> int:
    """That anybody of this processor's arithmetic, whose name holds the number of cores, is
    believed to have computed with: four for each core, so that no claim has an auditor make
    thousands."""
    return 4 * (os.cpu_count() or 1)


def threads_believed(threads: int) -> int:
    """So many at most, of those that a machine is set to compute with: nobody would compute again
    what more than that have computed, and all would hold it for wrong."""
    return min(threads, max_threads())


def _processor() -> list[str]:
    about = [torch.backends.cpu.get_cpu_capability(), platform.machine(), str(os.cpu_count())]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [*about, platform.processor()]
    first = text.split("\n\n")[0].splitlines()
    return about + [line for line in first if line.split(":")[0].strip() in _PROCESSOR_LINES]


def _card(device: torch.device) -> list[str]:
    """Libraries choose kernels by the number of multiprocessors, too."""
    card = torch.cuda.get_device_properties(device)
    return [
        str(torch.version.cuda),
        str(torch.backends.cudnn.version()),
        CudaCard(device).driver(),
        card.name,
        f"{card.major}.{card.minor}",
        str(card.multi_processor_count),
        torch.get_float32_matmul_precision(),
        os.environ.get(CUBLAS_SETTING, ""),
    ]
