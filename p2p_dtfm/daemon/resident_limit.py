"""How much a plan may give this peer, so that the whole process stays under its owner's limit.

A plan counts the state of layers (parameters, gradient, two moments) and what is kept of
microbatches. The process holds more: the program itself and p2pd; the last step's reduced
gradients; a copy of parameters and moments while a checkpoint is written; and whatever it guards
for others. Measured on `tiny`-like models of 73 and 293 MiB of state, a peer that trains alone
grows by 2.4 times that, and one that also guards as much as it holds by less than four times.
"""

import os

import psutil

from p2p_dtfm.core.errors import UserError

PLANNED_PART = 4
"""One part in so many of what may be taken yet is what a plan may give."""


def planned_bytes(limit_bytes: int) -> int:
    """What to tell the planner, when this process and its p2pd may hold `limit_bytes` in all.

    Raises `UserError` if they hold as much already.
    """
    taken_bytes = resident_bytes()
    if taken_bytes >= limit_bytes:
        raise UserError(
            f"--resident-gib {limit_bytes / (1 << 30):.2f} is too little: the program itself takes "
            f"{taken_bytes / (1 << 30):.2f} GiB",
            f"allow {(taken_bytes / (1 << 30)) + 0.5:.1f} or more, or leave it out",
        )
    return (limit_bytes - taken_bytes) // PLANNED_PART


def resident_bytes(process_id: int | None = None) -> int:
    """Resident set of a process (this one by default) and of those that it started."""
    process = psutil.Process(process_id or os.getpid())
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return total
