"""A member sends tiny frames as fast as it can. The others' work goes on between them."""

import asyncio
import socket

from p2p_dtfm.core.gate.byte_budget import ByteBudget
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.net.streams.bulk_settings import BulkLimits, BulkListeners
from p2p_dtfm.net.streams.byte_room import ByteRoom
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, encode_frame
from p2p_dtfm.net.streams.incoming import (
    AT_ONCE_FRAMES,
    BULK_VERSION,
    IncomingLanes,
    LaneHello,
)
from p2p_dtfm.net.streams.wire import LENGTH
from tests.net.net_support import run

RUN = "aa" * 32
FRAMES = 4_000


def test_a_flood_of_tiny_frames_leaves_the_loop_to_others() -> None:
    """All that one buffer held was taken at once, of frames of 60 bytes 3,915. On a slow machine
    nothing else was done for more than two seconds, again and again. As these were frames of a view
    that is over, which are dropped, they cost their sender nothing."""

    async def scenario() -> None:
        taken = 0

        async def take(sender: str, header: FrameHeader, payload: bytearray) -> None:
            nonlocal taken
            taken += 1

        room = ByteRoom(ByteBudget(1 << 27, 1 << 27))
        listeners = BulkListeners(take, lambda sender, fault: None)
        lanes = IncomingLanes(None, RUN, listeners, BulkLimits(), room)  # type: ignore[arg-type]
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        serving = asyncio.create_task(lanes.accept_stream("12D3KooWFlood", reader, writer))
        answers, flood = await asyncio.open_connection(sock=theirs)
        hello = encode(LaneHello(BULK_VERSION, RUN, "forward", 1, 0))
        header = FrameHeader(1, "ab", 2, FrameKind.ACTIVATION, 0, 0, "fp32", "float32", (1,))
        frame = encode_frame(header, bytes(4))[1] + bytes(4)
        flood.write(LENGTH.pack(len(hello)) + hello + FRAMES * frame)
        most = 0
        while taken < FRAMES:
            assert not serving.done()
            before = taken
            await asyncio.sleep(0)
            most = max(most, taken - before)
        assert 0 < most <= AT_ONCE_FRAMES
        assert len(await answers.readexactly(8 * (FRAMES + 1))) == 8 * (FRAMES + 1)
        flood.close()
        await serving

    run(scenario())
