"""How much a plan may give this peer, so that the whole process stays under its owner's limit.

A plan counts the state of layers (parameters, gradient, two moments), the sums beside it and what
is kept of microbatches. The process holds more: the program itself and p2pd; what travels; a copy
of parameters and moments while a checkpoint is written; and whatever it guards for others. Measured
on models of 74 and 293 MiB of state, a peer that trained alone grew by 2.4 times its state; of two
that each held half of 74 MiB and guarded the other half, on a machine that did much else, one grew
by 350 MiB. So this is no bound that the kernel keeps, but room that was enough where it was
measured.

What is guarded for others is part of it: `core.cost_model.guardians` gives a peer no more to guard
than its plan leaves of the same memory, and 64 MiB in any case.
"""

import os

import msgspec
import psutil

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.ports.granted import granted_memory

TRAVELLING_BYTES = 256 << 20
"""Left for what is sent and received: a few windows of `net.streams.bulk`."""
PLANNED_SIXTEENTHS = 5
"""The part of the rest that a plan may give."""


def planned_bytes(limit_bytes: int) -> int:
    """What to tell the planner, when this process and its p2pd may hold `limit_bytes` in all.

    Raises `UserError` if that leaves nothing.
    """
    taken_bytes = resident_bytes() + TRAVELLING_BYTES
    if taken_bytes >= limit_bytes:
        raise UserError(
            f"--resident-gib {limit_bytes / (1 << 30):.2f} is too little: the program itself, with "
            f"what travels, takes {taken_bytes / (1 << 30):.2f} GiB",
            f"allow {(taken_bytes / (1 << 30)) + 0.5:.1f} or more, or leave it out",
        )
    return (limit_bytes - taken_bytes) * PLANNED_SIXTEENTHS // 16


def within_resident_limit(settings: Settings, measured: Device) -> Device:
    """The device as others are told of it. Its memory is what leaves the whole process under its
    limit. This is called after measuring, when all that the program itself needs is loaded. Raises
    `UserError`."""
    limit_bytes = int(settings.resident_gib * (1 << 30))
    if not limit_bytes or measured.kind != "cpu":
        return measured
    memory_bytes = min(measured.memory_bytes, planned_bytes(limit_bytes))
    return msgspec.structs.replace(measured, memory_bytes=memory_bytes)


def resident_bytes(process_id: int | None = None) -> int:
    """Resident set of a process (this one by default) and of those that it started."""
    process = psutil.Process(process_id or os.getpid())
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:  # ended meanwhile
            continue
    return total


def memory_bytes(settings: Settings) -> int:
    """What this peer's owner allows, or what the machine has for it."""
    return settings.memory_limit_bytes or granted_memory().total_bytes
