"""A donor keeps the states it offers for as long as somebody may fetch them, and no longer."""

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch

from p2p_dtfm.core.cost_model import guardians
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.peers.wire import FollowEnded, FollowLayers, LayerOffered, LayersCommitted
from p2p_dtfm.daemon.state_transfer import donor as donor_module
from p2p_dtfm.daemon.state_transfer.donor import SUBSCRIPTIONS_LIMIT, Donor
from p2p_dtfm.daemon.state_transfer.offers import Offers
from p2p_dtfm.daemon.state_transfer.places import KnownPlaces
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import disk
from p2p_dtfm.train.data import BlobStore, blob_store
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.builders import run_spec
from tests.daemon.trainer_parts import settle

VIEW = ViewId(2, "ab" * 32)
SPEC = run_spec()


class Line:
    """Stands for messenger and bulk plane: keeps what is said; `broken` loses tensors."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.gradients: list[tuple[str, int, int]] = []
        self.broken = False
        self.open = asyncio.Event()
        self.open.set()

    def tell(self, peer_id: str, message: Any) -> None:
        self.said.append((peer_id, message))

    async def send(self, peer_id: str, lane: str, header: Any, payload: Any) -> None:
        await self.open.wait()
        if self.broken:
            raise Unreachable(peer_id, "gone")
        self.gradients.append((peer_id, header.step, header.layer))

    def heard_by(self, peer_id: str, kind: type) -> list[Any]:
        return [m for peer, m in self.said if peer == peer_id and isinstance(m, kind)]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Every place needs every layer here. `test_asked_for_states` has places that do not."""
    monkeypatch.setattr(KnownPlaces, "needs", lambda *asked: True)

    def run(scenario: Callable[..., Any]) -> None:
        async def whole() -> None:
            line, blobs, compute = Line(), BlobStore(tmp_path / "offers"), Compute()
            donor = Donor(line, line, compute, Offers(tmp_path / "offers"))  # type: ignore[arg-type]
            states = {layer: LayerState.genesis(SPEC, layer) for layer in (0, 1)}
            try:
                await scenario(donor, line, blobs, states)
            finally:
                donor.close()
                compute.close()

        asyncio.run(asyncio.wait_for(whole(), 20))

    return run


NUMBERS = itertools.count(1)


def request(layers: dict[int, int], view: ViewId = VIEW, from_takeover: bool = False) -> Any:
    return FollowLayers(view, next(NUMBERS), layers, from_takeover)


def view_named(view: ViewId, *members: str) -> Any:
    return SimpleNamespace(id=view, member_ids=members or ("x", "y"))


def outcome(step: int) -> StepOutcome:
    return StepOutcome(step, 1.0, 1.0, 1, None, None)


def gradients(states: dict[int, LayerState]) -> dict[int, Any]:
    return {layer: state.gradient_vector() for layer, state in states.items()}


def test_what_is_still_coming_is_offered_when_it_is_here(play: Callable[..., None]) -> None:
    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: Any) -> None:
        donor.subscribe("c", request({0: -1, 1: -1}))
        late = states.pop(1)
        await donor.offer(states, 0, coming=range(2))
        await settle()
        assert [offer.layer for offer in line.heard_by("c", LayerOffered)] == [0]
        assert not line.heard_by("c", FollowEnded) and donor.has_new_followers
        await donor.offer(states | {1: late}, 0, coming=range(2))
        await settle()
        assert [offer.layer for offer in line.heard_by("c", LayerOffered)] == [0, 1]
        donor.subscribe("d", request({1: -1}))
        await donor.offer(states, 0)
        assert line.heard_by("d", FollowEnded), "it is not held here, and does not come"

    play(scenario)


def test_a_follower_gets_state_then_every_step_and_its_blobs_go_in_the_end(play) -> None:
    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", request({0: -1, 1: -1}))
        donor.subscribe("y", request({1: -1}))
        assert donor.has_new_followers
        await donor.offer(states, 0)
        assert not donor.has_new_followers
        await settle()
        offers = line.heard_by("x", LayerOffered)
        assert [offer.layer for offer in offers] == [0, 1]
        assert sorted(offer.blob for offer in offers) == blobs.digests()
        for step in (0, 1):
            donor.reduced(step, gradients(states))
            donor.committed(outcome(step))
        donor.take_over(view_named(VIEW))
        donor.reduced(2, gradients(states))  # of the view that has taken over: not for them
        draining = asyncio.create_task(donor.drain(10.0))
        await settle()
        assert [m.step for m in line.heard_by("x", LayersCommitted)] == [0, 1]
        assert [g for g in line.gradients if g[0] == "y"] == [("y", 0, 1), ("y", 1, 1)]
        donor.unsubscribe("x", VIEW, offers[0].number)
        await settle()
        assert not draining.done(), "y has not said that it has all"
        assert len(blobs.digests()) == 1
        donor.unsubscribe("y", VIEW, offers[0].number + 1)
        await draining
        assert not line.heard_by("x", FollowEnded), "a takeover makes nobody ask anew"
        assert blobs.digests() == []

    play(scenario)


def test_a_state_stays_while_another_follower_may_fetch_it(play) -> None:
    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        for follower in ("x", "y"):
            donor.subscribe(follower, request({1: -1}))
        await donor.offer(states, 0)
        donor.subscribe("x", request({0: -1}))  # instead of layer 1
        assert len(blobs.digests()) == 1
        donor.close()
        assert blobs.digests() == []

    play(scenario)


def test_who_leaves_waits_as_long_as_what_it_sends_gets_on(
    play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last gradient of a large layer takes minutes to send, and nobody else has it."""
    monkeypatch.setattr(donor_module, "CHUNK_ELEMENTS", 64)
    monkeypatch.setattr(donor_module, "LEAST_BYTES_PER_S", 100)

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", asked := request({1: -1}))
        await donor.offer(states, 0)
        chunks = -(-len(states[1].gradient_vector()) // 64)
        at_once = line.send

        async def slowly(*of: Any) -> None:
            await asyncio.sleep(0.05)
            await at_once(*of)

        line.send = slowly  # type: ignore[method-assign]
        donor.reduced(0, gradients(states))
        draining = asyncio.create_task(donor.drain(2.0))
        assert chunks > 60, "so many take longer than nothing may happen"
        while len(line.gradients) < 60:
            await asyncio.sleep(0.01)
            assert not draining.done(), f"{len(line.gradients)} of {chunks} chunks are sent"
        donor.unsubscribe("x", VIEW, asked.number)
        await asyncio.wait_for(draining, 10.0)

    play(scenario)


def test_a_full_disk_gives_one_state_after_the_other(play, tmp_path: Path) -> None:
    """The first state on offer went when the next one found no room. A peer that needed two never
    had one (seed 700341)."""

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor._offers = Offers(tmp_path / "full", memory_limit_bytes=0)
        shutil.rmtree(tmp_path / "full")
        donor.subscribe("x", request({0: -1, 1: -1}))
        await donor.offer(states, 0)
        await settle()
        (first,) = line.heard_by("x", LayerOffered)
        assert donor._offers.find(first.blob) is not None and not line.heard_by("x", FollowEnded)
        assert not donor.has_new_followers, "it is not written again and again"
        donor.subscribe("x", request({first.layer: first.version, 1: -1}))
        await donor.offer(states, 0)
        await settle()
        _, second, here = line.heard_by("x", LayerOffered)
        assert second.layer == 1 and donor._offers.find(second.blob) is not None
        assert here.layer == first.layer and not here.blob
        donor.subscribe("y", request({0: -1}))
        await donor.offer(states, 0)
        await settle()
        assert line.heard_by("y", FollowEnded), "x has the room"

    play(scenario)


def test_a_state_is_there_though_one_of_the_same_bytes_goes_while_it_is_put(
    play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state was offered again and again, and was not there, until a step committed (seed
    800080)."""

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", first := request({0: -1}))
        await donor.offer(states, 0)
        donor.committed(outcome(0))  # what is written is old now, and x may still fetch it
        put, loop, puts = donor._offers.put, asyncio.get_running_loop(), list[str]()

        def put_while_x_goes(payload: memoryview, *others: Any) -> str:
            puts.append(digest := put(payload, *others))
            if len(puts) == 1:
                loop.call_soon_threadsafe(donor.unsubscribe, "x", VIEW, first.number)
            return digest

        monkeypatch.setattr(donor._offers, "put", put_while_x_goes)
        donor.subscribe("y", request({0: -1}))
        await donor.offer(states, 0)
        await settle()
        (offered,) = line.heard_by("y", LayerOffered)
        assert blobs.digests() == [offered.blob] and len(puts) == 2

    play(scenario)


class _SlowDisk(disk.MachineDisk):
    """A disk that takes a piece when it is told to."""

    def __init__(self) -> None:
        self.pieces = threading.Semaphore(0)

    def write(self, file: BinaryIO, payload: disk.Payload) -> None:
        assert self.pieces.acquire(timeout=10)
        super().write(file, payload)


def test_who_writes_a_state_for_others_gets_on(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor stands between two steps and waits for nobody. A large state on a slow disk takes
    longer than others wait for a peer that completes nothing."""
    monkeypatch.setattr(blob_store, "_CHUNK_BYTES", 1 << 12)
    slow = _SlowDisk()

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        disk.live_by(slow)
        donor.subscribe("x", request({0: -1}))
        offering = asyncio.create_task(donor.offer(states, 0))
        compute, payload = donor._compute, states[0].to_bytes()
        pieces = -(-len(payload) // (1 << 12))
        assert pieces >= 3
        while not compute.done_count:  # the copy of the state
            await asyncio.sleep(0.001)
        for done in range(1, pieces + 1):
            assert compute.done_count == done and not offering.done()
            slow.pieces.release()
            while compute.done_count == done:
                await asyncio.sleep(0.001)
        await offering
        await settle()
        (offered,) = line.heard_by("x", LayerOffered)
        assert offered.blob == digest_bytes(payload) and blobs.verify(offered.blob)

    play(scenario)


def test_a_follower_that_cannot_be_reached_is_told_to_ask_again(play) -> None:
    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", request({0: -1}))
        await donor.offer(states, 0)
        line.broken = True
        donor.reduced(0, gradients(states))
        await settle()
        (ended,) = line.heard_by("x", FollowEnded)
        assert "gone" in ended.reason
        donor.reduced(1, gradients(states))
        donor.committed(outcome(1))
        assert blobs.digests() == []
        assert not donor.has_new_followers

    play(scenario)


def test_a_follower_is_told_where_gradients_cannot_be_sent_at_all(play) -> None:
    """The follower would wait for the gradients for ever."""

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        async def fails(*frame: Any) -> None:
            raise ValueError("a bug")

        line.send = fails  # type: ignore[method-assign]
        donor.subscribe("x", request({0: -1}))
        await donor.offer(states, 0)
        donor.reduced(0, gradients(states))
        await settle()
        assert line.heard_by("x", FollowEnded)

    play(scenario)


def test_who_asks_as_the_donor_goes_is_told_and_nobody_stays_to_feed_it(play) -> None:
    """A worker waited for news that never came, after all else had ended (seed 500894)."""

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.close()
        asked = request({0: -1})
        donor.subscribe("x", asked)
        (ended,) = line.heard_by("x", FollowEnded)
        assert ended.number == asked.number
        assert not donor._workers and not donor.has_new_followers

    play(scenario)


def test_a_follower_that_does_not_keep_up_is_dropped_and_not_waited_for(
    play, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = 4 * LayerState.genesis(SPEC, 0).parameter_count
    monkeypatch.setattr(guardians, "QUEUED_BYTES_LIMIT", 3 * size_bytes)

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", request({0: -1}))
        await donor.offer(states, 0)
        line.open.clear()
        for step in range(4):
            assert not line.heard_by("x", FollowEnded)
            donor.reduced(step, gradients(states))
            await settle()
        (ended,) = line.heard_by("x", FollowEnded)
        assert "behind" in ended.reason
        donor.committed(outcome(3))
        assert blobs.digests() == []

    play(scenario)


def test_layers_of_any_size_can_be_followed(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step's gradients alone are more than may usually wait. A state is larger than a file that
    others may send."""
    monkeypatch.setattr(guardians, "QUEUED_BYTES_LIMIT", 1)

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor._offers._store.limit_bytes = 1
        donor.subscribe("x", request({0: -1, 1: -1}))
        await donor.offer(states, 0)
        for step in range(4):
            donor.reduced(step, gradients(states))
            donor.committed(outcome(step))
            await settle()
        assert [m.step for m in line.heard_by("x", LayersCommitted)] == [0, 1, 2, 3]
        assert not line.heard_by("x", FollowEnded)

    play(scenario)


def test_gradients_are_copied_once_a_step_however_often_somebody_asks_anew(
    play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each small request made the holder copy all gradients that it had reduced, while all
    waited."""
    clone, copied = torch.Tensor.clone, []

    def counted(tensor: Any, *of: Any, **form: Any) -> Any:
        copied.append(tensor)
        return clone(tensor, *of, **form)

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        reduced = gradients(states)
        monkeypatch.setattr(torch.Tensor, "clone", counted)
        for asked in range(5):
            donor.subscribe("x", request({0: 0, 1: 0}))
            await donor.offer(states, 0)
            donor.reduced(0, reduced)
            await settle()
            assert len(line.gradients) == 2 * (asked + 1), "it has them each time"
        assert len(copied) == 2
        for step in (1, 2):
            donor.committed(outcome(step - 1))
            donor.reduced(step, reduced)
        assert len(copied) == 6, "of each step anew"
        donor.take_over(view_named(VIEW))
        donor.subscribe("x", request({0: 0}, from_takeover=True))
        await donor.offer(states, 0)
        donor.reduced(2, reduced)
        assert len(copied) == 7, "of a step that is repeated as well"

    play(scenario)


def test_a_guardian_may_ask_early_and_is_fed_through_the_takeover(play) -> None:
    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", request({0: -1}))
        donor.subscribe("x", request({1: -1}, from_takeover=True))
        await donor.offer(states, 0)
        await settle()
        assert [offer.layer for offer in line.heard_by("x", LayerOffered)] == [0]
        assert not donor.has_new_followers, "nothing is offered before the takeover"
        donor.take_over(view_named(VIEW))
        await donor.offer(states, 0)
        donor.reduced(0, gradients(states))
        await settle()
        assert line.gradients == [("x", 0, 1)], "the place is taken, the guardian goes on"
        donor.take_over(view_named(ViewId(3, "cd" * 32)))
        donor.reduced(1, gradients(states))
        await settle()
        assert line.gradients == [("x", 0, 1)]

    play(scenario)


def test_who_leaves_waits_for_guardians_too(play) -> None:
    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.take_over(view_named(VIEW))
        donor.subscribe("x", request({0: -1}, from_takeover=True))
        await donor.offer(states, 0)
        await settle()
        (offer,) = line.heard_by("x", LayerOffered)
        draining = asyncio.create_task(donor.drain(10.0))
        await settle()
        assert not draining.done()
        donor.unsubscribe("x", VIEW, offer.number)
        await draining

    play(scenario)


def test_who_leaves_does_not_wait_for_a_follower_that_was_lost(play) -> None:
    """The leaver waited until that follower's last request was forgotten: a minute, in which nobody
    wants anything."""

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.take_over(view_named(VIEW))
        for follower in ("x", "y"):
            donor.subscribe(follower, request({0: -1}))
        await donor.offer(states, 0)
        await settle()
        donor.take_over(view_named(ViewId(3, "cd" * 32), "y"))
        draining = asyncio.create_task(donor.drain(10.0))
        await settle()
        assert not draining.done(), "the other one may still fetch what it was offered"
        donor.unsubscribe("y", VIEW, line.heard_by("y", LayerOffered)[0].number)
        await asyncio.wait_for(draining, 5.0)

    play(scenario)


def test_a_state_of_another_step_is_not_offered(play) -> None:
    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", request({0: -1}))
        await donor.offer(states, 7)
        await settle()
        assert not line.said
        assert donor.has_new_followers, "it waits until the layer is there"

    play(scenario)


def test_layers_that_are_not_here_are_refused_in_words(play) -> None:
    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", request({0: -1, 5: -1}))
        await donor.offer(states, 0)
        (ended,) = line.heard_by("x", FollowEnded)
        assert "layer 5 is not held here" in ended.reason
        assert blobs.digests() == []

    play(scenario)


def test_what_is_on_its_way_goes_on_to_its_end_when_nobody_wants_it_any_more(play) -> None:
    """A frame that is cut short breaks the lane. With it the follower loses what it is sent there
    as a guardian."""

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.subscribe("x", request({0: -1, 1: -1}))
        await donor.offer(states, 0)
        line.open.clear()
        donor.reduced(0, gradients(states))
        await settle()
        donor.unsubscribe("x", VIEW, line.heard_by("x", LayerOffered)[0].number)
        await settle()
        line.open.set()
        await settle()
        assert line.gradients == [("x", 0, 0)], "and nothing more is sent"

    play(scenario)


def test_a_request_that_was_overtaken_takes_nobody_s_place(play) -> None:
    """The follower asked again, as its first request seemed lost; the first request came after all.
    From then on the follower took the donor's words for answers to an earlier request, and waited
    for ever."""

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        lost, again = request({0: -1}), request({0: -1, 1: -1})
        donor.subscribe("x", again)
        donor.subscribe("x", lost)
        await donor.offer(states, 0)
        await settle()
        donor.subscribe("x", again)  # a call may come twice
        await donor.offer(states, 0)
        await settle()
        offers = line.heard_by("x", LayerOffered)
        assert [(it.number, it.layer) for it in offers] == [(again.number, 0), (again.number, 1)]

    play(scenario)


def test_who_has_what_it_wanted_is_fed_nothing_though_its_request_comes_after_that(play) -> None:
    """The follower was stopped while it asked, and nobody stopped its request again. The donor sent
    it every step of the view, and waited a minute for it before leaving."""

    async def scenario(donor: Donor, line: Line, blobs: BlobStore, states: dict) -> None:
        donor.agreed(view_named(VIEW, "x"))
        asked, later = request({0: -1}, from_takeover=True), request({0: -1}, from_takeover=True)
        donor.unsubscribe("x", VIEW, asked.number)
        donor.subscribe("x", asked)
        assert not donor._subscriptions
        donor.subscribe("x", later)
        assert donor._subscriptions, "it asks anew"
        for number in range(3, 100):
            donor.unsubscribe("x", ViewId(number, "cd" * 32), 1)
            donor.unsubscribe(f"stranger {number}", VIEW, 1)
        assert len(donor._done) <= SUBSCRIPTIONS_LIMIT
        donor.take_over(view_named(ViewId(200, "ef" * 32), "x"))
        assert not donor._done

    play(scenario)
