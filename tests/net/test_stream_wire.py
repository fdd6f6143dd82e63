"""A lane's stream through libp2p, where the memory of what is sent belongs to the caller."""

import asyncio
import socket

import pytest

from p2p_dtfm.net.streams.wire import StreamWire, written
from tests.net.net_support import run


class _FirstComes:
    def must_wait(self) -> bool:
        return False

    async def wait(self) -> None:
        return


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "stalled"])
def test_what_is_given_up_halfway_is_not_read_any_more(is_cancelled: bool) -> None:
    """The caller may put other numbers into that memory at once, which nobody has asked to be sent.
    As the end of the frame they would make their sender one that sends what it has not computed."""

    async def scenario() -> None:
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=here)
        wire = StreamWire(reader, writer)
        payload = memoryview(bytearray(4 << 20))
        there.setblocking(False)
        stall_s = 60.0 if is_cancelled else 0.2
        sending = asyncio.create_task(wire.write_frame(b"start", payload, _FirstComes(), stall_s))
        loop = asyncio.get_running_loop()
        came = bytearray(await loop.sock_recv(there, 1 << 20))
        await asyncio.sleep(0.1)
        assert writer.transport.get_write_buffer_size(), "the kernel is full"
        if is_cancelled:
            sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled() or isinstance(sending.exception(), TimeoutError)
        payload[:] = b"x" * len(payload)
        wire.close()
        while data := await loop.sock_recv(there, 1 << 20):
            came += data
        assert b"x" not in came
        there.close()

    run(scenario())


def test_what_was_written_whole_still_leaves() -> None:
    async def scenario() -> None:
        here, there = socket.socketpair()
        wire = StreamWire(*await asyncio.open_connection(sock=here))
        await wire.write_frame(b"start", memoryview(b"whole"), _FirstComes(), 5.0)
        await written(wire.write(b"a word"))
        wire.close()
        there.setblocking(False)
        loop, came = asyncio.get_running_loop(), b""
        while data := await loop.sock_recv(there, 1 << 20):
            came += data
        assert came == b"startwholea word"
        there.close()

    run(scenario())
