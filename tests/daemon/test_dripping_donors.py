"""A donor gives a state slowly, on purpose or over a thin line, where others have the state and
where nobody has. In virtual time."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.commit.judgement import DIGEST_BYTES
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.snapshot import HeldLayer
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import ConfirmLayers, FollowDone, FollowLayers, LayerOffered
from p2p_dtfm.daemon.peers.wire import StateDigest as Digest
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.ports import now
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.planning import name_of
from tests.daemon.trainer_parts import SPEC, QuietOutlet, trainer_tools, view_of
from tests.net.test_slow_donors import MBIT, Host, Stall, in_virtual_time

STEP = 7
ME, FIRST, SECOND, THIRD = map(name_of, range(4))
LAYERS = (0, 1, 2)


def bytes_of(layer: int, version: int = STEP, last: int = 0) -> bytes:
    made = LayerState.genesis(SPEC, layer)
    made.version = version
    payload = bytes(made.to_bytes())
    return payload[:-1] + bytes([payload[-1] ^ last])


SIZE_BYTES = len(bytes_of(1))


class Swarm:
    """Donors that offer what they are asked for, and one follower."""

    def __init__(self, hosts: dict[str, Any]) -> None:
        self._hosts = hosts
        self._given: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.done: list[str] = []
        self.lies: set[str] = set()
        """The donors that give other states than the rest have."""
        self.refuses: set[str] = set()
        """The donors that offer a state, and have none."""
        self.silent: set[str] = set()
        """The donors that are asked, and offer nothing."""
        self.version = STEP
        self.again_s: dict[str, float] = {}
        """The donors that offer anew, under a new name, so often."""
        self.followers: Any = None

    async def joins(self, name: str, bytes_per_s: int, stall: Stall | None = None) -> None:
        given = self._given[name] = {}
        host: Any = Host(self._hosts, name, bytes_per_s, stall)
        await BlobExchange(host, given.get).ready()

    async def ask(self, peer_id: str, message: FollowLayers) -> None:
        self.asked.append(peer_id)
        asyncio.get_running_loop().call_later(0.1, self._offer, peer_id, message, 0)

    def _offer(self, donor: str, asked: FollowLayers, times: int) -> None:
        for layer in asked.layers if donor not in self.silent else ():
            version = self.version + times
            payload = bytes_of(layer, version, donor in self.lies)
            name = digest_bytes(payload)
            if donor not in self.refuses:
                self._given[donor][name] = payload
            offer = LayerOffered(asked.view, asked.number, layer, version, name, len(payload))
            self.followers.receive(donor, offer)
        if donor in self.again_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self.again_s[donor], self._offer, donor, asked, times + 1)

    def tell(self, peer_id: str, message: Any) -> None:
        if isinstance(message, FollowDone):
            self.done.append(peer_id)
        if isinstance(message, ConfirmLayers):
            for layer in message.layers:
                payload = bytes_of(layer, self.version, peer_id in self.lies)
                said = bytes.fromhex(digest_bytes(payload))[:DIGEST_BYTES]
                answer = Digest(message.view, message.number, layer, self.version, said)
                asyncio.get_running_loop().call_soon(self.followers.receive, peer_id, answer)


Scene = Callable[[Swarm], Any]


def follows(
    directory: Path,
    scene: Scene,
    donors: tuple[str, ...] = (FIRST, SECOND),
    uplinks: dict[str, int] | None = None,
    times: int = 1,
    and_then: Callable[[Swarm], None] | None = None,
) -> tuple[float, Swarm]:
    """How long the follower takes until all layers are here, in the view after a failure, the last
    time. `and_then` makes all layers come once more."""

    async def whole(hosts: dict[str, Any]) -> tuple[float, Swarm]:
        swarm = Swarm(hosts)
        blobs = await BlobExchange(Host(hosts, ME, MBIT), lambda digest: None).ready()  # type: ignore[arg-type]
        tools = trainer_tools(directory, ME, swarm, blobs)
        await scene(swarm)
        state = TrainerState(ME)
        swarm.followers = followers = Followers(tools, QuietOutlet(), state)
        took_s = 0.0
        try:
            for _ in range(times):
                state.states.clear()
                began_s = now.monotonic_s()
                followers.follow(view_with(donors, uplinks or {}), set(LAYERS))
                await all_here(swarm, state)
                if and_then is not None:
                    and_then(swarm)
                    await all_here(swarm, state)
                took_s = now.monotonic_s() - began_s
        finally:
            followers.stop_following()
            await asyncio.sleep(1.0)
            tools.compute.close()
        return took_s, swarm

    return in_virtual_time(whole)


async def all_here(swarm: Swarm, state: TrainerState) -> None:
    async with asyncio.timeout(3600.0):
        while [state.states[n].version for n in state.states] != [swarm.version] * len(LAYERS):
            await state.wait(1.0)


def view_with(donors: tuple[str, ...], uplinks: dict[str, int]) -> View:
    """The view after a failure, before which these donors have held all layers."""
    found = view_of(1, 4)
    records = tuple(
        msgspec.structs.replace(record, uplink_bytes_per_s=uplinks.get(record.peer_id, 0))
        for record in found.snapshot.records
    )
    held = tuple(HeldLayer(peer, layer, STEP) for peer in donors for layer in LAYERS)
    snapshot = msgspec.structs.replace(
        found.snapshot, records=records, planned=False, held=held, step=STEP
    )
    return View(snapshot, found.plan)


def allowed_s(bytes_per_s: int = 250_000) -> float:
    return 5.0 + len(LAYERS) * SIZE_BYTES / bytes_per_s


@pytest.mark.parametrize("stall_s", [29.0, 5.0])
def test_who_drips_is_left_before_who_fetches_is_blamed(tmp_path: Path, stall_s: float) -> None:
    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, 100 * MBIT, lambda asked: stall_s)
        await swarm.joins(SECOND, 10 * MBIT)

    took_s, swarm = follows(tmp_path, scene)
    assert took_s < allowed_s() + 5.0
    assert swarm.done[0] == FIRST, "it need not feed what is followed elsewhere"


@pytest.mark.parametrize("again_s", [0.3, 4.0])
def test_who_offers_again_and_again_gains_no_time_by_it(tmp_path: Path, again_s: float) -> None:
    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, 100 * MBIT, lambda asked: 29.0)
        await swarm.joins(SECOND, 10 * MBIT)
        swarm.again_s[FIRST] = again_s

    took_s, _ = follows(tmp_path, scene)
    assert took_s < allowed_s() + 5.0


def test_who_has_not_what_it_offers_is_left(tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, 100 * MBIT)
        await swarm.joins(SECOND, 10 * MBIT)
        swarm.refuses.add(FIRST)

    took_s, _ = follows(tmp_path, scene)
    assert took_s < 5.0


def test_what_the_others_deny_is_not_fetched_to_its_end(tmp_path: Path) -> None:
    """The line is said to be thin, so the fetch would take a minute at least."""

    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, 8_000)
        for name in (SECOND, THIRD):
            await swarm.joins(name, 10 * MBIT)
        swarm.lies.add(FIRST)

    took_s, _ = follows(tmp_path, scene, (FIRST, SECOND, THIRD), {FIRST: 8_000})
    assert took_s < 5.0


@pytest.mark.parametrize("bytes_per_s", [12_000, 20_000, 47_000])
def test_who_gives_what_its_thin_line_carries_is_not_left(tmp_path: Path, bytes_per_s: int) -> None:
    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, bytes_per_s)
        await swarm.joins(SECOND, 10 * MBIT)

    _, swarm = follows(tmp_path, scene, uplinks={FIRST: bytes_per_s, SECOND: 10 * MBIT})
    assert swarm.asked == [FIRST]


def test_who_gives_less_than_it_says_is_left(tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, 8_000)
        await swarm.joins(SECOND, 10 * MBIT)

    took_s, _ = follows(tmp_path, scene, uplinks={FIRST: 10 * MBIT, SECOND: 10 * MBIT})
    assert took_s < 12.0


@pytest.mark.parametrize("bytes_per_s", [4_000, 8_000])
def test_the_only_donor_is_never_left(tmp_path: Path, bytes_per_s: int) -> None:
    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, bytes_per_s)

    _, swarm = follows(tmp_path, scene, (FIRST,))
    assert not swarm.done[1:]


def test_where_all_are_slower_than_they_say_it_comes_all_the_same(tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        for name in (FIRST, SECOND):
            await swarm.joins(name, 4_000)

    took_s, _ = follows(tmp_path, scene, uplinks={FIRST: 10 * MBIT, SECOND: 10 * MBIT})
    assert took_s < 4 * len(LAYERS) * SIZE_BYTES / 4_000, "each is asked with more patience"


def test_who_never_offers_anything_is_left(tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, 100 * MBIT)
        await swarm.joins(SECOND, 10 * MBIT)
        swarm.silent.add(FIRST)

    took_s, _ = follows(tmp_path, scene)
    assert took_s < allowed_s() + 5.0


def test_who_was_too_slow_is_not_the_first_again(tmp_path: Path) -> None:
    """Nor is it the first for a follower that the members have refused, and that asks anew with the
    next view."""

    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, 100 * MBIT, lambda asked: 29.0)
        await swarm.joins(SECOND, 10 * MBIT)

    took_s, swarm = follows(tmp_path, scene, times=2)
    assert took_s < 3.0
    assert swarm.asked == [FIRST, SECOND, SECOND]


def test_what_is_fetched_once_more_is_not_given_up(tmp_path: Path) -> None:
    """A stream broke with steps on it, so states that were here are fetched anew, and drip now."""
    stalls_s = [0.0]

    async def scene(swarm: Swarm) -> None:
        await swarm.joins(FIRST, 10 * MBIT, lambda asked: stalls_s[0])
        await swarm.joins(SECOND, 10 * MBIT)

    def breaks(swarm: Swarm) -> None:
        stalls_s[0] = 29.0
        swarm.version += 1
        swarm.followers.stream_lost(FIRST)

    took_s, _ = follows(tmp_path, scene, and_then=breaks)
    assert took_s < allowed_s() + 8.0
