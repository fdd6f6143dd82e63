"""Blobs arrive whole, verified and bounded, whoever the donors are."""

import asyncio
import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from p2p_dtfm.core.protocol.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams import blobs
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.train.data import blob_store
from p2p_dtfm.train.data.blob_store import BlobStore
from tests.net.net_support import hosts, run

CONTENT = os.urandom((3 << 20) + 17)
DIGEST = digest_bytes(CONTENT)


def _put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / f"{name}.blob"
    path.write_bytes(content)
    return path


async def _donor(host: Host, found: Path | bytes | None) -> str:
    await BlobExchange(host, lambda digest: found if digest == DIGEST else None).ready()
    return host.peer_id


def test_a_blob_comes_whole_and_atomically(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            donor = await _donor(one, _put(tmp_path, "good", CONTENT))
            target = tmp_path / "got" / "blob"
            assert (
                await BlobExchange(two, lambda digest: None).fetch(DIGEST, [donor], target, 4 << 20)
                == target
            )
            assert target.read_bytes() == CONTENT
            assert [entry.name for entry in target.parent.iterdir()] == ["blob"]

    run(scenario())


def test_a_blob_may_be_named_by_another_digest(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (one, liar, two):
            name = blake3(CONTENT).hexdigest()
            for host, found in ((one, CONTENT), (liar, CONTENT[1:] + b"?")):
                await BlobExchange(host, {name: found}.get).ready()
            exchange = BlobExchange(two, lambda digest: None)
            assert await exchange.fetch_bytes(name, [one.peer_id], 4 << 20, blake3) == CONTENT
            with pytest.raises(BlobUnavailable):
                await exchange.fetch_bytes(name, [liar.peer_id], 4 << 20, blake3)

    run(scenario())


def test_who_has_lost_what_it_wrote_gives_nothing_and_is_not_blamed(tmp_path: Path) -> None:
    """A power cut had left other bytes in a shard. Each peer that asked for it blamed its honest
    donor for wrong bytes (seed 500040 of the virtual ones)."""
    store = BlobStore(tmp_path / "store")
    store.put_bytes(CONTENT)
    (store.root / DIGEST).write_bytes(CONTENT[:-1] + b"?")

    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (one, two, three):
            for host, its in ((one, BlobStore(store.root)), (three, store)):
                await BlobExchange(host, its.path, unread=its.unread).ready()
            faults: list[str] = []
            exchange = BlobExchange(
                two, lambda digest: None, lambda peer, fault: faults.append(peer)
            )
            with pytest.raises(BlobUnavailable, match="no longer here"):
                await exchange.fetch_bytes(DIGEST, [one.peer_id], 4 << 20)
            assert not faults and not store.has(DIGEST), "it is fetched again"
            store.put_bytes(CONTENT)
            peers = [one.peer_id, three.peer_id]
            assert await exchange.fetch_bytes(DIGEST, peers, 4 << 20) == CONTENT
            assert not faults

    run(scenario())


def test_who_waits_until_a_file_is_read_whole_waits_without_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk takes ten seconds to read a shard of a gigabyte. Meanwhile each peer that asked for
    it, or for a known one, held one of the threads for which all else waits: steps, states, what is
    saved."""
    store, goes_on = BlobStore(tmp_path / "store"), threading.Event()
    known = store.put_bytes(b"known")
    store.put_bytes(CONTENT)
    store = BlobStore(store.root)
    assert store.verify(known)
    looks: list[Path] = []

    def slow(path: Path) -> str:
        looks.append(path)
        assert goes_on.wait(10)
        return DIGEST

    monkeypatch.setattr(blob_store, "file_digest", slow)

    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (one,):
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
            exchange = BlobExchange(one, store.path, unread=store.unread)

            def asked(digest: str) -> bytes:
                return encode(blobs._Request(digest, 0, 4))

            waiting = [
                asyncio.create_task(exchange._serve("somebody", asked(DIGEST))) for _ in range(12)
            ]
            try:
                async with asyncio.timeout(3):
                    while not looks:
                        await asyncio.sleep(0.01)
                    await asyncio.to_thread(lambda: None)
                    reply = decode(await exchange._serve("another", asked(known)), blobs._Chunk, 99)
                assert reply.content == b"know" and not any(task.done() for task in waiting)
            finally:
                goes_on.set()
            replies = await asyncio.gather(*waiting)
            assert decode(replies[-1], blobs._Chunk, 99).content == CONTENT[:4]
            assert len(looks) == 1, "one reads it for all"

    run(scenario())


def test_a_blob_comes_from_memory_to_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (one, liar, two):
            peers = [await _donor(liar, CONTENT[1:] + b"?"), await _donor(one, CONTENT)]
            exchange = BlobExchange(two, lambda digest: None)
            assert await exchange.fetch_bytes(DIGEST, peers, 4 << 20) == CONTENT
            with pytest.raises(BlobUnavailable, match="do not have this digest"):
                await exchange.fetch_bytes(DIGEST, peers[:1], 4 << 20)

    run(scenario())


@pytest.mark.parametrize("limit_bytes", [blobs.BEGUN_LIMIT_BYTES, 1], ids=["small", "large"])
def test_what_came_before_a_donor_died_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int
) -> None:
    """The next donor is found later, and the first one may have given wrong bytes. A state of more
    than 256 MiB began anew each time that its line broke, and never came over some lines."""
    monkeypatch.setattr(blobs, "BEGUN_LIMIT_BYTES", limit_bytes)

    async def scenario(honest_first: bool) -> None:
        async with hosts(tmp_path / f"{honest_first}", 3, all_met=True) as (one, two, three):
            content = CONTENT if honest_first else b"?" + CONTENT[1:]
            given: list[str] = []
            came: list[int] = []

            def dying(digest: str) -> bytes | None:
                given.append(digest)  # however slow this machine is, not all of it has come
                return content if len(given) <= 3 else None

            await BlobExchange(one, dying).ready()
            second = await BlobExchange(two, lambda digest: CONTENT).ready()
            exchange = BlobExchange(
                three, lambda digest: None, on_progress=lambda _, offset, total: came.append(offset)
            )
            with pytest.raises(BlobUnavailable):
                await exchange.fetch_bytes(DIGEST, [one.peer_id], 4 << 20)
            assert any(came), "part of it came"
            assert await exchange.fetch_bytes(DIGEST, [two.peer_id], 4 << 20) == CONTENT
            whole, again = len(CONTENT), second.given_bytes[three.peer_id]
            assert again < whole if honest_first else whole < again < 2 * whole

    for honest_first in (True, False):
        run(scenario(honest_first))


def test_what_broke_off_is_gone_on_with_by_the_same_digest_alone(tmp_path: Path) -> None:
    """A liar names a part by the digest that a state has by another hash, gives some of it and
    stops. The state's honest donor was then found wrong."""

    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (liar, one, two):
            given: list[str] = []

            def dying(digest: str) -> bytes | None:
                given.append(digest)
                return CONTENT if len(given) <= 3 else None

            await BlobExchange(liar, dying).ready()
            donor = await _donor(one, CONTENT)
            faults: list[str] = []
            exchange = BlobExchange(
                two, lambda digest: None, lambda peer_id, fault: faults.append(peer_id)
            )
            with pytest.raises(BlobUnavailable):
                await exchange.fetch_bytes(DIGEST, [liar.peer_id], 4 << 20, blake3)
            assert await exchange.fetch_bytes(DIGEST, [donor], 4 << 20) == CONTENT
            assert not faults

    run(scenario())


def test_a_call_that_is_cancelled_loses_nothing_that_came(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            peers = [await _donor(one, CONTENT)]
            come: list[int] = []
            some = asyncio.Event()

            def progress(digest: str, done_bytes: int, total_bytes: int) -> None:
                come.append(done_bytes)
                if done_bytes:
                    some.set()

            exchange = BlobExchange(two, lambda digest: None, None, progress)
            call = asyncio.create_task(exchange.fetch_bytes(DIGEST, peers, 4 << 20))
            await some.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            broke_off, come[:] = max(come), []
            assert await exchange.fetch_bytes(DIGEST, peers, 4 << 20) == CONTENT
            assert come[0] > broke_off

    run(scenario())


def test_bad_donors_are_passed_over_and_the_liar_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a busy machine a peer that is late to say that it has the blob is asked after the others
    monkeypatch.setattr(blobs, "ASK_DEADLINE_S", 30.0)

    async def scenario() -> None:
        async with hosts(tmp_path, 5, all_met=True) as (one, liar, short, empty, fetcher):
            lie = CONTENT[: 1 << 20] + b"x" + CONTENT[(1 << 20) + 1 :]
            peers = [
                await _donor(empty, None),
                await _donor(liar, _put(tmp_path, "lie", lie)),
                await _donor(short, _put(tmp_path, "short", CONTENT[: 1 << 20])),
                await _donor(one, _put(tmp_path, "good", CONTENT)),
            ]
            faults: list[tuple[str, PeerFault]] = []
            exchange = BlobExchange(
                fetcher, lambda digest: None, lambda *fault: faults.append(fault)
            )
            await exchange.fetch(DIGEST, peers, tmp_path / "blob", 4 << 20)
            assert (tmp_path / "blob").read_bytes() == CONTENT
            assert [peer_id for peer_id, _ in faults] == [liar.peer_id, short.peer_id]

    run(scenario())


def test_who_answers_that_it_has_none_is_told_apart_from_who_does_not_answer(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 4, all_met=True) as (liar, empty, gone, fetcher):
            lie = _put(tmp_path, "lie", CONTENT[1:] + b"?")
            peers = [await _donor(empty, None), await _donor(liar, lie), gone.peer_id]
            await gone.close()
            exchange = BlobExchange(fetcher, lambda digest: None)
            with pytest.raises(BlobUnavailable) as found:
                await exchange.fetch_bytes(DIGEST, peers, 4 << 20)
            assert set(found.value.causes) == set(peers)
            assert found.value.denied == {empty.peer_id, liar.peer_id}

    run(scenario())


@pytest.mark.parametrize("honest_second", [True, False])
def test_a_donor_that_dies_midway_is_continued_by_the_next(
    tmp_path: Path, honest_second: bool
) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3, all_met=True) as (one, two, three):
            path = _put(tmp_path, "good", CONTENT)
            served = []

            def dying(digest: str) -> Path | None:
                served.append(digest)
                return path if len(served) <= 3 else None

            first = BlobExchange(one, dying)
            await first.ready()
            other = CONTENT if honest_second else CONTENT[:-1] + b"?"
            second_path = _put(tmp_path, "second", other)
            second = await BlobExchange(two, lambda digest: second_path).ready()
            exchange = BlobExchange(three, lambda digest: None)
            target = tmp_path / "blob"
            if honest_second:
                await exchange.fetch(DIGEST, [one.peer_id, two.peer_id], target, 4 << 20)
                assert target.read_bytes() == CONTENT
                given_bytes = second.given_bytes[three.peer_id]
                assert 0 < given_bytes < len(CONTENT), "what had come is not fetched again"
            else:
                with pytest.raises(BlobUnavailable) as error:
                    await exchange.fetch(DIGEST, [one.peer_id, two.peer_id], target, 4 << 20)
                text = str(error.value)
                assert DIGEST in text and one.peer_id in text and two.peer_id in text
                assert not target.exists()
                assert not [p for p in tmp_path.iterdir() if p.name.startswith(".blob")]

    run(scenario())


def test_a_blob_above_the_bound_is_not_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            donor = await _donor(one, _put(tmp_path, "good", CONTENT))
            exchange = BlobExchange(two, lambda digest: None)
            with pytest.raises(BlobUnavailable, match="at most 1048576"):
                await exchange.fetch(DIGEST, [donor], tmp_path / "blob", 1 << 20)
            with pytest.raises(BlobUnavailable, match="no peer to ask"):
                await exchange.fetch(DIGEST, [], tmp_path / "blob", 1 << 20)

    run(scenario())


def test_who_fetches_again_while_it_is_still_hashed_finds_its_donor_honest(tmp_path: Path) -> None:
    """A new view ends what followed the one before, wherever that was, and follows the same states.
    The thread that hashed them went on, over the file that was now hashed anew."""
    begun, goes_on = asyncio.Event(), threading.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        class Slow:
            """Hashes as `blake2b_of_blobs` does, but the first hash waits in its middle."""

            def __init__(self) -> None:
                self._hash = hashlib.blake2b(digest_size=32)

            def update(self, piece: bytes) -> None:
                self._hash.update(piece)
                if not begun.is_set():
                    loop.call_soon_threadsafe(begun.set)
                    goes_on.wait(10)
                elif not goes_on.is_set():
                    goes_on.set()
                    time.sleep(0.2)  # the other hash reads on meanwhile

            def hexdigest(self) -> str:
                return self._hash.hexdigest()

        async with hosts(tmp_path, 2) as (one, two):
            peers, faults = [await _donor(one, CONTENT)], []
            exchange = BlobExchange(two, lambda digest: None, lambda peer, _: faults.append(peer))
            call = asyncio.create_task(exchange.fetch_bytes(DIGEST, peers, 4 << 20, Slow))
            await begun.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert await exchange.fetch_bytes(DIGEST, peers, 4 << 20, Slow) == CONTENT
            assert not faults

    run(scenario())


@pytest.mark.parametrize("is_relative", [True, False])
def test_a_file_that_is_a_link_is_kept_itself(tmp_path: Path, is_relative: bool) -> None:
    """The data of a run may lie in a cache, with links to them."""
    target, link = tmp_path / "cached", tmp_path / "shard"
    target.write_bytes(b"tokens")
    link.symlink_to(target.name if is_relative else target)
    store = BlobStore(tmp_path / "home" / "blobs")
    digest = store.put_file(link)
    target.unlink()
    stored = store.path(digest)
    assert stored is not None and stored.read_bytes() == b"tokens" and not stored.is_symlink()


def test_what_was_removed_is_looked_at_again_when_it_is_back(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "of-removed")
    digest = store.put_file(_put(tmp_path, "removed", b"content"))
    assert store.unread(digest) is None
    store.remove(digest)
    assert store.unread(digest) is None, "there is nothing to be read"
    (store.root / digest).write_bytes(b"c0ntent")  # another process has put it there
    look = store.unread(digest)
    assert look is not None and not look()
