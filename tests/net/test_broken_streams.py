"""A stream that ends before it says anything is no error of ours; any other error still shows."""

import asyncio
import logging

import pytest

from p2p_dtfm.net import event_loop
from p2p_dtfm.net.libp2p.around_hivemind import expect_broken_streams


async def greets_with(error: BaseException) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        raise error

    expect_broken_streams(asyncio.get_running_loop())
    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await reader.read()  # until the stream has been greeted
        await asyncio.sleep(0.05)
        writer.close()


def test_only_broken_greetings_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.WARNING, "asyncio")  # other tests may have silenced it
    event_loop.run(greets_with(asyncio.IncompleteReadError(b"", 1)))
    assert not caplog.records
    event_loop.run(greets_with(ValueError("a bug")))
    assert "a bug" in caplog.text
