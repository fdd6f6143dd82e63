"""What computes the same bits has the same name."""

import hashlib
import os
import platform
from pathlib import Path

import torch

_PROCESSOR_LINES = ("model name", "flags", "Features")


def arithmetic_name(device: torch.device) -> str:
    """Of processor, vector unit and torch; empty for a device of which nobody has shown that it
    repeats its bits. The number of threads counts as well, and is said with each work."""
    if device.type != "cpu":
        return ""
    facts = [
        str(torch.__version__),
        torch.backends.cpu.get_cpu_capability(),
        platform.machine(),
        str(os.cpu_count()),
        *_processor(),
    ]
    return "cpu-" + hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()


def threads_here() -> int:
    """Of the thread that asks."""
    return torch.get_num_threads()


def max_threads() -> int:
    """That anybody of this arithmetic, whose name holds the number of cores, is believed to have
    computed with: four for each core, so that no claim has an auditor make thousands."""
    return 4 * (os.cpu_count() or 1)


def threads_believed(threads: int) -> int:
    """So many at most, of those that a machine is set to compute with: nobody would compute again
    what more than that have computed, and all would hold it for wrong."""
    return min(threads, max_threads())


def _processor() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [platform.processor()]
    first = text.split("\n\n")[0].splitlines()
    return [line for line in first if line.split(":")[0].strip() in _PROCESSOR_LINES]
