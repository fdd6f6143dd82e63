"""The virtual network does what libp2p's network does."""

import asyncio
import gc
import random
import weakref
from pathlib import Path
from typing import Any

from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.wires.network import VirtualNetwork


def test_what_a_host_reads_ends_when_it_closes_also_where_nobody_is_left_at_the_other_end(
    tmp_path: Path,
) -> None:
    """p2pd's sockets end in the same way. The peer that measured this host's link was killed behind
    a cut."""

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


def test_a_link_that_damages_changes_a_word_of_what_streams_carry(tmp_path: Path) -> None:
    async def scene(loop: VirtualLoop) -> None:
        network, came = VirtualNetwork(loop, random.Random(1)), list[bytes]()
        one, other = (
            network.join(
                Process(name, loop, random.Random(name)), Identity.load_or_create(tmp_path / name)
            )
            for name in ("one", "other")
        )

        async def keep(sender: str, reader: asyncio.StreamReader, writer: Any) -> None:
            while part := await reader.read(100):
                came.append(part)

        await one.serve_streams("lane", keep)
        await other.connect(one.peer_id, [one.address], 5.0)
        _, writer = await other.open_stream(one.peer_id, "lane", 5.0)
        for share in (0.0, 1.0, 0.0):
            network.links.of(other.peer_id, one.peer_id).damaged = share
            writer.write(b"abcde")
            await asyncio.sleep(1.0)
        assert came == [b"abcde", b"ab\x9c\x9b\x9a", b"abcde"]
        await one.close()
        await other.close()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(scene(loop))
    finally:
        loop.close()


class _Arrival:
    """Called when something arrives."""

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __call__(self) -> None:
        self._seen.append("here")


def test_what_has_arrived_is_gone_without_the_collector() -> None:
    """Nor does a message stay that a cut held up. These were nearly all of a seed's garbage: each
    call, with its tasks, and each piece of a stream."""

    async def scene(loop: VirtualLoop) -> None:
        links, seen = VirtualNetwork(loop, random.Random(1)).links, list[str]()
        known = list[weakref.ref[_Arrival]]()

        def send() -> None:
            arrival = _Arrival(seen)
            known.append(weakref.ref(arrival))
            links.carry("a", "b", "it", 100, arrival)

        send()
        await asyncio.sleep(1.0)
        send()  # this one is under way as the link breaks, and the next one comes too late
        links.cut("a", "b")
        send()
        await asyncio.sleep(1.0)
        assert len(seen) == 1 and known[2]() is not None
        links.mend("a", "b")
        await asyncio.sleep(1.0)
        assert len(seen) == 3
        assert [it() for it in known] == [None, None, None]

    loop = VirtualLoop()
    gc.disable()
    try:
        loop.run_until_complete(scene(loop))
    finally:
        gc.enable()
        loop.close()


def test_what_is_under_way_arrives_though_its_sender_has_ended_or_stands_still() -> None:
    """A kernel has taken such data. The message waited for its sender's next turn, and a dead
    sender has none."""

    async def scene(loop: VirtualLoop) -> None:
        links, seen = VirtualNetwork(loop, random.Random(1)).links, list[str]()

        async def sends(name: str) -> None:
            links.carry(name, "b", "it", 100, _Arrival(seen))

        for name, ends in (("dead", Process.kill), ("still", Process.pause)):
            process = Process(name, loop, random.Random(name))
            await process.begin(sends(name))
            ends(process)
        await asyncio.sleep(1.0)
        assert seen == ["here", "here"]

    loop = VirtualLoop()
    try:
        loop.run_until_complete(scene(loop))
    finally:
        loop.close()
