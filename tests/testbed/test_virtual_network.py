"""The virtual network does what libp2p's does."""

import asyncio
import random
from pathlib import Path
from typing import Any

from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.network import VirtualNetwork
from p2p_dtfm.testbed.virtual.process import Process


def test_what_a_host_reads_ends_when_it_closes_also_where_nobody_is_left_at_the_other_end(
    tmp_path: Path,
) -> None:
    """As with p2pd, whose sockets end. Who measured this one's link was killed behind a cut."""

    async def scene(loop: VirtualLoop) -> None:
        network, ended = VirtualNetwork(loop, random.Random(1)), list[str]()
        names = ("one", "other")
        processes = [Process(name, loop, random.Random(name)) for name in names]
        one, other = (
            network.join(process, Identity.load_or_create(tmp_path / name))
            for process, name in zip(processes, names, strict=True)
        )

        async def count(sender: str, reader: asyncio.StreamReader, writer: Any) -> None:
            try:
                while await reader.read(1):
                    pass
            finally:
                ended.append(sender)

        await one.serve_streams("probe", count)
        await other.connect(one.peer_id, [one.address], 5.0)
        _, writer = await other.open_stream(one.peer_id, "probe", 5.0)
        writer.write(b"?")
        await asyncio.sleep(1.0)
        network.links.of(other.peer_id, one.peer_id).is_cut = True
        processes[1].kill()
        network.leave(other)
        await asyncio.sleep(1.0)
        assert not ended, "nothing tells it"
        await one.close()
        await asyncio.sleep(1.0)
        assert ended == [other.peer_id]

    loop = VirtualLoop()
    try:
        loop.run_until_complete(scene(loop))
    finally:
        loop.close()
