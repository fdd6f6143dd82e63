"""Copies of the run's data at each member, so that no peer's death takes the only one along."""

import asyncio
import logging

from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.data import BlobStore

log = logging.getLogger("p2p_dtfm")

DATA_KEPT_LIMIT_BYTES = 2 << 30
DATA_RETRY_S = 5.0


async def bring_data(participant: Participant) -> None:
    """Fetch all of the run's data ahead of need. A corpus above the limit stays with those whose
    steps read it. Data of a run that leaves its ends to some members stay with those. A shard that
    nobody gives holds up no other."""
    membership, run = participant.membership, participant.membership.run
    me = membership.network.me.peer_id
    if participant.initial.withheld:  # its data are withheld as well
        return
    sizes = run.manifest.blobs()
    limits = [DATA_KEPT_LIMIT_BYTES, participant.local.disk_limit_bytes // 2]
    if sum(sizes.values()) > min(filter(None, limits)):
        return
    order = sorted(sizes)
    start = sum(me.encode()) % len(order)  # members do not all begin with the same shard
    while me not in membership.members():  # others give it to members alone
        await asyncio.sleep(DATA_RETRY_S / 5)
    missing = [*order[start:], *order[:start]]
    while missing := [digest for digest in missing if _may_lack(run.blobs, digest)]:
        for digest in missing:
            try:
                await participant.fetch_shards({digest})
            except (BlobUnavailable, OSError) as error:
                log.debug("data: %s", error)
                await asyncio.sleep(DATA_RETRY_S)


def _may_lack(blobs: BlobStore, digest: str) -> bool:
    """Whether a file is not here, or its disk cannot be looked at now."""
    try:
        return not blobs.has(digest)
    except OSError:
        return True
