"""Data shards that several parts of a daemon want. A change of views does not stop their fetch."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.daemon.peers.run_source import SharedFetches
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.train.data import BlobStore
from tests.net.net_support import hosts, run

CONTENT = os.urandom(3 << 20)
DIGEST = digest_bytes(CONTENT)


@contextlib.asynccontextmanager
async def donor_and_fetches(
    directory: Path, content: bytes | None
) -> AsyncIterator[tuple[BlobExchange, SharedFetches, BlobStore]]:
    async with hosts(directory, 2) as (one, two):
        donor = await BlobExchange(one, lambda digest: content).ready()
        store = BlobStore(directory / "blobs")
        exchange = BlobExchange(two, store.path)
        fetches = SharedFetches(store, exchange, lambda: [one.peer_id])
        yield donor, fetches, store
        await fetches.close()


def test_who_gives_up_waiting_loses_nothing_that_came(tmp_path: Path) -> None:
    """From a founder with 47 kB/s up, five homes began to fetch anew with the second view. They
    were called silent before the end."""

    async def scenario() -> None:
        async with donor_and_fetches(tmp_path, CONTENT) as (donor, fetches, store):
            waiting = [asyncio.create_task(fetches.have(DIGEST, 4 << 20)) for _ in range(3)]
            while not donor.given_bytes.total():
                await asyncio.sleep(0)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await fetches.have(DIGEST, 4 << 20)
            path = store.path(DIGEST)
            assert path is not None and path.read_bytes() == CONTENT
            assert donor.given_bytes.total() == len(CONTENT), "each byte once"

    run(scenario())


def test_what_nobody_has_can_be_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with donor_and_fetches(tmp_path, None) as (_, fetches, _):
            for _ in range(2):
                with pytest.raises(BlobUnavailable):
                    await fetches.have(DIGEST, 4 << 20)

    run(scenario())


def test_nothing_goes_on_after_the_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with donor_and_fetches(tmp_path, CONTENT) as (donor, fetches, store):
            waiting = asyncio.create_task(fetches.have(DIGEST, 4 << 20))
            while not donor.given_bytes.total():
                await asyncio.sleep(0)
            await fetches.close()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert store.path(DIGEST) is None

    run(scenario())
