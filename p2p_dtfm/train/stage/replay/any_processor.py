"""The same bits on every x86-64 processor: without the vector units that only some have."""

import os

import torch

SETTINGS = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
}
"""Environment variables by which torch, MKL and oneDNN use none of these units."""


def compute_alike() -> None:
    """Has this process, and those that it starts, compute the same bits on all x86-64 machines.

    Libraries read the settings once, when they first compute. Raises `RuntimeError` if torch has
    done so before with other ones."""
    os.environ.update(SETTINGS)
    unit = torch.backends.cpu.get_cpu_capability()
    if unit != "DEFAULT":
        raise RuntimeError(f"this process computes by {unit} already")
