"""Copies that every member fetches beside training: a file that nobody gives holds up no other."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.node.background.data_copies import bring_data
from p2p_dtfm.daemon.state_transfer import initial_states
from p2p_dtfm.daemon.state_transfer.initial_states import InitialStates
from p2p_dtfm.daemon.telemetry.status import Status
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.data import BlobStore
from p2p_dtfm.train.model.gpt import layer_count
from tests.core.builders import run_spec
from tests.daemon.test_endings import in_quick_time

ME = "me"
SHARDS = [f"{number:02x}" * 32 for number in range(12)]


class Shards:
    """The part of a daemon that fetches data. Nobody gives a file of the lost digests."""

    def __init__(self, lost: set[str], withheld: frozenset[int] = frozenset()) -> None:
        self.lost, self.here, self.asked = lost, set[str](), 0
        manifest = SimpleNamespace(blobs=lambda: dict.fromkeys(SHARDS, 1))
        blobs = SimpleNamespace(has=lambda digest: digest in self.here)
        self.participant: Any = SimpleNamespace(
            membership=SimpleNamespace(
                run=SimpleNamespace(manifest=manifest, blobs=blobs),
                network=SimpleNamespace(me=SimpleNamespace(peer_id=ME)),
                members=lambda: {ME},
            ),
            local=SimpleNamespace(disk_limit_bytes=0),
            initial=SimpleNamespace(withheld=withheld),
            fetch_shards=self.fetch,
        )

    async def fetch(self, digests: set[str]) -> None:
        self.asked += 1
        if digests & self.lost:
            raise BlobUnavailable(min(digests), {})
        self.here |= digests


@pytest.mark.parametrize("lost", SHARDS[:4])
def test_a_shard_that_nobody_gives_holds_up_no_other(lost: str) -> None:
    """The shards after the lost one in this peer's order had no copy. The next death could take the
    only one along, and nobody was told."""

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        shards = Shards({lost})
        bringing = asyncio.create_task(bring_data(shards.participant))
        await passes(120.0)
        assert shards.here == set(SHARDS) - {lost} and shards.asked < 12 + 30
        shards.lost = set()
        await passes(30.0)
        assert bringing.done() and shards.here == set(SHARDS)

    in_quick_time(scene)


def test_a_disk_that_cannot_be_looked_at_for_a_moment_ends_nobody() -> None:
    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        shards = Shards(set())
        blobs, looks = shards.participant.membership.run.blobs, iter(range(3))
        has = blobs.has

        def away_at_first(digest: str) -> bool:
            if next(looks, None) is not None:
                raise OSError(errno.EIO, "Input/output error")
            return bool(has(digest))

        blobs.has = away_at_first
        bringing = asyncio.create_task(bring_data(shards.participant))
        await passes(30.0)
        assert bringing.done() and bringing.exception() is None and shards.here == set(SHARDS)

    in_quick_time(scene)


def test_who_is_not_given_the_data_asks_nobody_for_them() -> None:
    """In a run that leaves its ends to some members, every other member asked all of them, every
    five seconds, for ever."""

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        shards = Shards(set(SHARDS), frozenset({0, 5}))
        bringing = asyncio.create_task(bring_data(shards.participant))
        await passes(30.0)
        assert bringing.done() and not shards.asked

    in_quick_time(scene)


def test_given_weights_that_nobody_gives_hold_up_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that ends with adapters had no layer after the lost one to use them with."""
    monkeypatch.setattr(initial_states, "RETRY_S", 0.001)
    spec, tried = run_spec(), list[int]()
    states = InitialStates(spec, BlobStore(tmp_path), Any, Compute(), Status(), list)

    async def fetched(layer: int) -> Path:
        tried.append(layer)
        if layer == 1 and tried.count(1) < 3:
            raise BlobUnavailable("ab" * 32, {})
        return tmp_path

    monkeypatch.setattr(states, "_fetched", fetched)
    asyncio.run(asyncio.wait_for(states._keep_all(), 10))
    assert tried == [*range(layer_count(spec)), 1, 1]


def test_what_was_kept_once_is_not_read_again_with_each_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guardian of adapters read all that is frozen of its layers in each new view, before it
    counted. Steps waited for it."""
    states: Any = InitialStates(run_spec(), BlobStore(tmp_path), Any, Compute(), Status(), list)
    states._spec = SimpleNamespace(trains_adapters=True)
    here, read = tmp_path / "layer", list[int]()

    async def fetched(layer: int) -> Path:
        read.append(layer)
        here.touch()
        return here

    async def scenario() -> None:
        for _ in range(3):
            await states.keep(1)
        assert read == [1]
        here.unlink()
        await states.keep(1)
        assert read == [1, 1] and here.exists()

    monkeypatch.setattr(states, "_fetched", fetched)
    asyncio.run(scenario())
