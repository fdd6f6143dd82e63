"""A donor gives a blob slowly, on purpose or because its line is slow. This is in virtual time,
over lines that all that a donor gives has to share."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.net.door import OpenDoor
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.net.streams.donors import CHUNK_FIRST_BYTES, PATIENCES, DonorTurn
from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.loop import VirtualLoop

Result = TypeVar("Result")
CONTENT = os.urandom(2 << 20)
DIGEST = digest_bytes(CONTENT)
ALLOWED_S = 5 + len(CONTENT) / 250_000
"""Seconds that others allow a member that says it fetches this blob."""
MBIT = 125_000
SLICE_BYTES = 8 << 10
Stall = Callable[[int], float]
"""How long a donor waits before its answer, by how many questions came before."""


class Clock:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic_ns(self) -> int:
        return self._loop.now_ns

    wall_ns = awake_or_asleep_ns = monotonic_ns

    def block_ns(self, duration_ns: int) -> None:
        raise AssertionError("nothing waits")


def in_virtual_time(scene: Callable[[dict[str, Any]], Awaitable[Result]]) -> Result:
    async def whole() -> Result:
        now.live_by(Clock(loop))
        return await scene({})

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(whole())
    finally:
        loop.close()


class Host:
    """A host among `hosts`, whose uplink carries so much."""

    shaper = None
    door = OpenDoor()

    def __init__(
        self, hosts: dict[str, Any], name: str, bytes_per_s: int, stall: Stall | None = None
    ) -> None:
        self.peer_id, self._hosts, self._bytes_per_s = name, hosts, bytes_per_s
        self._stall, self._line, self._asked = stall, asyncio.Lock(), 0
        hosts[name] = self

    async def serve_calls(self, name: str, handler: Callable[..., Awaitable[bytes]]) -> None:
        self._handler = handler

    async def call(self, peer_id: str, name: str, body: bytes, deadline_s: float) -> bytes:
        try:
            async with asyncio.timeout(deadline_s):
                return await self._hosts[peer_id].give(self.peer_id, body)
        except TimeoutError as error:
            raise Unreachable(peer_id, "no answer") from error

    async def give(self, sender: str, body: bytes) -> bytes:
        self._asked += 1
        asked = self._asked - 1
        answer = await self._handler(sender, body)
        if self._stall is not None:
            await asyncio.sleep(self._stall(asked))
        for at in range(0, len(answer), SLICE_BYTES):
            async with self._line:
                await asyncio.sleep(len(answer[at : at + SLICE_BYTES]) / self._bytes_per_s)
        await asyncio.sleep(0.05)
        return answer


async def exchange_of(
    hosts: dict[str, Any],
    name: str,
    has: bool = True,
    bytes_per_s: int = 5 * MBIT,
    stall: Stall | None = None,
) -> BlobExchange:
    host: Any = Host(hosts, name, bytes_per_s, stall)
    return await BlobExchange(host, lambda digest: CONTENT if has else None).ready()


async def took_s(fetching: Awaitable[bytes]) -> float:
    began_s = now.monotonic_s()
    assert await fetching == CONTENT
    return now.monotonic_s() - began_s


@pytest.mark.parametrize(
    "stall",
    [
        pytest.param(lambda asked: 29.0, id="each"),
        pytest.param(lambda asked: 2.9, id="a little"),
        pytest.param(lambda asked: 29.0 if asked > 2 else 0.0, id="after some"),
    ],
)
def test_who_answers_slowly_is_passed_over_in_time(stall: Stall) -> None:
    """The blob then comes over an honest home's line in time. For minutes the slow donor is asked
    last."""

    async def scene(hosts: dict[str, Any]) -> None:
        await exchange_of(hosts, "liar", bytes_per_s=100 * MBIT, stall=stall)
        await exchange_of(hosts, "honest")
        fetcher = await exchange_of(hosts, "fetcher", has=False)
        peers = ["liar", "honest"]
        assert await took_s(fetcher.fetch_bytes(DIGEST, peers, 4 << 20)) < ALLOWED_S
        assert await took_s(fetcher.fetch_bytes(DIGEST, peers, 4 << 20)) < 5.0, "nobody waits"

    in_virtual_time(scene)


@pytest.mark.parametrize("names", [("one",), ("one", "two"), tuple(f"home {n}" for n in range(40))])
def test_a_slow_home_gives_all_to_many_at_once(names: tuple[str, ...]) -> None:
    """Nobody better is there, and little is lost on the way."""

    async def scene(hosts: dict[str, Any]) -> None:
        for name in names:
            await exchange_of(hosts, name, bytes_per_s=MBIT)
        count = 6
        fetchers = [await exchange_of(hosts, f"fetcher {n}", has=False) for n in range(count)]
        fetches = []
        for n, fetcher in enumerate(fetchers):
            peers = [*names[n % len(names) :], *names[: n % len(names)]]
            fetches.append(took_s(fetcher.fetch_bytes(DIGEST, peers, 4 << 20)))
        longest_s = max(await asyncio.gather(*fetches))
        least_s = max(1.0, count / len(names)) * len(CONTENT) / MBIT
        assert longest_s < 1.3 * least_s + 15

    in_virtual_time(scene)


def test_over_a_thin_line_no_byte_comes_twice() -> None:
    """A founder with 47 kB/s up has the data alone, and all who fetch ask one another as well. Each
    broke off what the founder was sending after three seconds, and asked for it again."""

    async def scene(hosts: dict[str, Any]) -> None:
        founder = await exchange_of(hosts, "founder", bytes_per_s=47_000)
        names = [f"home {n}" for n in range(5)]
        homes = [await exchange_of(hosts, name, has=False) for name in names]
        fetches = []
        for name, home in zip(names, homes, strict=True):
            others = [each for each in names if each != name]
            peers = [*others[:2], "founder", *others[2:]]
            fetches.append(took_s(home.fetch_bytes(DIGEST, peers, 4 << 20)))
        longest_s = max(await asyncio.gather(*fetches))
        assert founder.given_bytes.total() < 1.001 * 5 * len(CONTENT)
        assert longest_s < 1.05 * 5 * len(CONTENT) / 47_000

    in_virtual_time(scene)


def test_what_is_small_says_nothing_of_a_line() -> None:
    """A chunk that is the whole of a file comes at once over any line."""
    turn = DonorTurn(PATIENCES[0], CHUNK_FIRST_BYTES)
    turn.came(now.monotonic_s(), 531)
    assert turn.length_bytes == CHUNK_FIRST_BYTES
    turn.came(now.monotonic_s(), CHUNK_FIRST_BYTES)
    assert turn.length_bytes == 2 * CHUNK_FIRST_BYTES


def test_a_home_of_five_mbit_alone_is_as_fast_as_its_line() -> None:
    async def scene(hosts: dict[str, Any]) -> None:
        await exchange_of(hosts, "home")
        fetcher = await exchange_of(hosts, "fetcher", has=False)
        fetching = took_s(fetcher.fetch_bytes(DIGEST, ["home"], 4 << 20))
        assert await fetching < 1.2 * len(CONTENT) / (5 * MBIT)

    in_virtual_time(scene)


def test_the_only_donor_is_waited_for_as_long_as_it_says_something() -> None:
    """Once the donor says nothing, nobody has the blob."""

    async def scene(hosts: dict[str, Any]) -> None:
        await exchange_of(hosts, "slow", bytes_per_s=100 * MBIT, stall=lambda asked: 20.0)
        await exchange_of(hosts, "silent", stall=lambda asked: 1000.0)
        fetcher = await exchange_of(hosts, "fetcher", has=False)
        await took_s(fetcher.fetch_bytes(DIGEST, ["silent", "slow"], 4 << 20))
        with pytest.raises(BlobUnavailable, match="silent"):
            await fetcher.fetch_bytes(DIGEST, ["silent"], 4 << 20)

    in_virtual_time(scene)
