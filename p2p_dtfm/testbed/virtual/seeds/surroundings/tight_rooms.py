"""Bounds of queues and buffers that the small model never reaches, lowered until it does. There is
room for two steps' gradients, for one state at a time, and for no state in memory beside another
one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2p_dtfm.core.cost_model import guardians
from p2p_dtfm.daemon.state_transfer import donor
from p2p_dtfm.daemon.state_transfer.following import arriving_gradients, follower, replaying
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.trainer import view_mail
from p2p_dtfm.net.streams import probing
from p2p_dtfm.testbed.virtual.patches import Patches

QUEUED_MESSAGES = 32
COMMITTED_STEPS = 4
EARLY_BYTES = 256
FIRST_PROBE_BYTES = 1 << 17


@contextlib.contextmanager
def tight_rooms() -> Iterator[None]:
    """Lowers them for all daemons of this process, meanwhile."""
    patches = Patches()
    try:
        patches.put(guardians, "QUEUED_BYTES_LIMIT", 0)
        patches.put(donor, "QUEUED_MESSAGES_LIMIT", QUEUED_MESSAGES)
        patches.put(arriving_gradients, "GRADIENTS_LIMIT_BYTES", 0)
        patches.put(follower, "FETCHED_LIMIT_BYTES", 0)
        patches.put(replaying, "COMMITTED_LIMIT", COMMITTED_STEPS)
        patches.put(view_mail, "EARLY_LIMIT_BYTES", EARLY_BYTES)

        def made(offers: Any, directory: Path) -> None:
            make(offers, directory, memory_limit_bytes=0)

        make = patches.put(Offers, "__init__", made)
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def small_probes() -> Iterator[None]:
    """For lines as thin as `links.THIN_BYTES_PER_S`. Where dozens come at once, each measures its
    line to each, and the probes are else most of all that happens."""
    patches = Patches()
    try:

        async def probe_bandwidth(probes: Any, peer_id: str) -> int:
            rate: int = await probe(probes, peer_id, FIRST_PROBE_BYTES)
            return rate

        probe = patches.put(probing.Probes, "probe_bandwidth", probe_bandwidth)
        yield
    finally:
        patches.undo()
