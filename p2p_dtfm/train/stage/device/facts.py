"""What a device is and what it can do, read and timed once.

What only a machine with a card can tell is asked through `CardPort`, so that it can be replaced by
given values elsewhere.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from p2p_dtfm.core.protocol.facts.device_facts import TEXT_LIMIT, DeviceFacts
from p2p_dtfm.ports.granted import granted_memory

HOST_SHARE = 0.5
"""Offered share of the free memory beside a card: its own copies and the program need the rest."""
_RATE_BYTES = 64 << 20
_SIDES = {"cpu": 512, "cuda": 4096}
_RUNS = 3
_SLOW_S = 0.15
"""A product that takes longer than this is not repeated."""


class CardPort(Protocol):
    """An accelerator, as its driver tells of it."""

    def memory_bytes(self) -> int: ...

    def capability(self) -> str: ...

    def driver(self) -> str: ...

    def finish(self) -> None:
        """Wait until the card has done what it was given."""


class CudaCard:
    """A card, as torch and the driver's own page tell of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def capability(self) -> str:
        major, minor = torch.cuda.get_device_capability(self._device)
        return f"{major}.{minor}"

    def driver(self) -> str:
        with contextlib.suppress(OSError):
            page = Path("/sys/module/nvidia/version").read_text(encoding="utf-8", errors="replace")
            return page.strip()
        return ""

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


def device_facts(device: torch.device, card: CardPort | None = None) -> DeviceFacts:
    """What the device is and can do. Takes about a quarter of a second."""
    host = granted_memory()
    if card is None and device.type == "cuda":
        card = CudaCard(device)
    finish = card.finish if card is not None else _nothing
    return DeviceFacts(
        memory_bytes=card.memory_bytes() if card is not None else host.total_bytes,
        host_bytes=host.total_bytes,
        host_free_bytes=int(host.free_bytes * HOST_SHARE) if card is not None else host.free_bytes,
        fp32_mflops=product_mflops(device, torch.float32, finish),
        bf16_mflops=product_mflops(device, torch.bfloat16, finish),
        capability=(card.capability() if card is not None else _vector_unit())[:TEXT_LIMIT],
        driver=(card.driver() if card is not None else "")[:TEXT_LIMIT],
        torch=str(torch.__version__)[:TEXT_LIMIT],
        host_bytes_per_s=host_rate(device, finish) if card is not None else 0,
    )


def _nothing() -> None:
    """Nothing to wait for: a processor is done when its call returns."""


def _vector_unit() -> str:
    return str(torch.backends.cpu.get_cpu_capability())


def product_mflops(
    device: torch.device, dtype: torch.dtype, finish: Callable[[], None] = _nothing
) -> int:
    """Million operations per second of a product of two square matrices: the median of a few."""
    side = _SIDES.get(device.type, _SIDES["cpu"])
    left = torch.full((side, side), 0.5, device=device, dtype=dtype)
    spent_s = _timed(lambda: torch.mm(left, left), finish)
    return max(1, int(2 * side**3 / spent_s / 1e6))


def host_rate(device: torch.device, finish: Callable[[], None] = _nothing) -> int:
    """Bytes per second between this machine's memory and the device's, in the slower direction."""
    here = torch.zeros(_RATE_BYTES, dtype=torch.uint8)
    there = torch.zeros(_RATE_BYTES, dtype=torch.uint8, device=device)
    spent_s = max(
        _timed(lambda: there.copy_(here), finish), _timed(lambda: here.copy_(there), finish)
    )
    return max(1, int(_RATE_BYTES / spent_s))


def _timed(work: Callable[[], object], finish: Callable[[], None]) -> float:
    """Seconds of one run. The first run may choose kernels: it counts only if it is slow."""
    runs: list[float] = []
    for _ in range(1 + _RUNS):
        began_s = time.perf_counter()
        work()
        finish()
        runs.append(time.perf_counter() - began_s)
        if runs[-1] > _SLOW_S:
            break
    return max(1e-9, statistics.median(runs[1:] or runs))
