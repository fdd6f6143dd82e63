"""What comes for a follower in the very moment in which it is stopped changes nothing any more."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.planner.wire_plan import CHUNK_ELEMENTS
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import HeldLayer, ViewId
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import (
    ConfirmLayers,
    FollowLayers,
    LayerOffered,
    LayersCommitted,
    StateDigest,
)
from p2p_dtfm.daemon.state_transfer.following import arriving_gradients, replaying
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.planning import name_of
from tests.daemon.trainer_parts import SPEC, QuietOutlet, settle, trainer_tools, view_of

HELD = tuple(HeldLayer(name_of(0), layer, 7) for layer in (0, 1))


HOLDER, ME = name_of(0), name_of(1)
COUNT = workload_of(SPEC).layer_count


def guarded(number: int, step: int) -> tuple[View, Plan]:
    """A view in which this peer has no stage, and guards all layers."""
    pipeline = Pipeline((Stage(HOLDER, 0, COUNT, 1),), 0, SPEC.microbatches_per_step)
    plan = Plan((pipeline,), (ME,), 3_600_000_000_000)
    snapshot = msgspec.structs.replace(view_of(number, 2).snapshot, step=step)
    return View(snapshot, plan), plan


def planned() -> View:
    """A view that two peers come to with the plan that they have had."""
    found = view_of(1, 2)
    assert isinstance(found.plan, Plan)
    return View(msgspec.structs.replace(found.snapshot, present=found.plan), found.plan)


def unplanned() -> View:
    """A view of two peers after a failure: of two layers one has the states."""
    found = view_of(1, 2)
    snapshot = msgspec.structs.replace(found.snapshot, planned=False, held=HELD, step=7)
    return View(snapshot, found.plan)


def state_at(layer: int, version: int) -> LayerState:
    made = LayerState.genesis(SPEC, layer)
    made.version = version
    return made


class Outlet(QuietOutlet):
    def __init__(self) -> None:
        self.synced_views: list[ViewId] = []

    def synced(self, view: ViewId) -> None:
        self.synced_views.append(view)


class Line:
    """A messenger that can reach everyone."""

    def __init__(self) -> None:
        self.requests: list[FollowLayers] = []
        self.confirms: list[ConfirmLayers] = []

    async def ask(self, peer_id: str, message: FollowLayers) -> None:
        self.requests.append(message)

    def tell(self, peer_id: str, message: Any) -> None:
        if isinstance(message, ConfirmLayers):
            self.confirms.append(message)


@pytest.mark.parametrize("stops", [False, True])
def test_what_arrives_while_it_is_stopped(tmp_path: Path, stops: bool) -> None:
    """A holder says that this peer already has the layer that it asked for."""
    outlet = Outlet()
    line = Line()
    tools = trainer_tools(tmp_path, name_of(1), line)
    state = TrainerState()
    state.states[0] = LayerState.genesis(SPEC, 0)
    view = planned()

    async def run() -> None:
        followers = Followers(tools, outlet, state)
        followers.follow(view, {0})
        await settle()
        number = line.requests[0].number
        followers.receive(name_of(0), LayerOffered(view.id, number, 0, 0, "", 0))
        if stops:
            followers.stop_following()
        await settle()
        await state.wait(0.01)  # raises what has ended the follower
        followers.stop_following()
        await settle()

    asyncio.run(run())
    tools.compute.close()
    assert outlet.synced_views == ([] if stops else [view.id])


def test_a_layer_that_is_here_counts_once_what_is_frozen_of_it_is_here(tmp_path: Path) -> None:
    """Of a home that was copied without its blobs a guardian with the adapters alone counted. Where
    their holder died, nobody had the layer's weights any more."""
    outlet, line, state = Outlet(), Line(), TrainerState()
    tools = trainer_tools(tmp_path, name_of(1), line)
    state.states[0] = LayerState.genesis(SPEC, 0)
    view = planned()
    comes, asked = asyncio.Event(), list[int]()

    async def keep(layer: int) -> None:
        asked.append(layer)
        await comes.wait()

    initial: Any = tools.stores.initial
    initial.keep = keep

    async def run() -> None:
        followers = Followers(tools, outlet, state)
        followers.follow(view, {0})
        await settle()
        number = line.requests[0].number
        followers.receive(name_of(0), LayerOffered(view.id, number, 0, 0, "", 0))
        await settle()
        assert asked == [0] and not outlet.synced_views
        comes.set()
        await settle()
        assert outlet.synced_views == [view.id]
        followers.stop_following()
        await settle()

    asyncio.run(run())
    tools.compute.close()


class Blobs:
    """A blob exchange that gives what it is told to give, when it is told to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.given: dict[str, asyncio.Future[bytes]] = {}

    async def fetch_bytes(
        self, digest: str, peers: list[str], max_bytes: int, on_came: Any = None
    ) -> bytes:
        self.begun.append(digest)
        self.given[digest] = asyncio.get_running_loop().create_future()
        return await self.given[digest]


def test_layers_come_side_by_side_and_a_later_offer_replaces_an_earlier_one(tmp_path: Path) -> None:
    blobs: Any = Blobs()
    outlet = Outlet()
    line = Line()
    tools = trainer_tools(tmp_path, name_of(1), line, blobs)
    state = TrainerState()
    view = unplanned()
    names = {name: name * 64 for name in "abc"}

    def bytes_of(layer: int, version: int) -> bytes:
        return state_at(layer, version).to_bytes()

    async def run() -> None:
        followers = Followers(tools, outlet, state)
        followers.follow(view, {0, 1})
        await settle()
        number = line.requests[0].number

        def offer(layer: int, version: int, name: str) -> None:
            size_bytes = len(bytes_of(layer, version))
            message = LayerOffered(view.id, number, layer, version, names[name], size_bytes)
            followers.receive(name_of(0), message)

        offer(0, 7, "a")
        offer(1, 7, "b")
        await settle()
        assert blobs.begun == [names["a"], names["b"]], "neither waits for the other"
        offer(0, 9, "c")
        await settle()
        assert blobs.given[names["a"]].cancelled()
        blobs.given[names["c"]].set_result(bytes_of(0, 9))
        blobs.given[names["b"]].set_result(bytes_of(1, 7))
        while set(state.states) != {0, 1}:
            await state.wait(1.0)
        assert [state.states[layer].version for layer in (0, 1)] == [9, 7]
        followers.stop_following()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def test_a_donor_that_gives_too_much_undoes_nothing_of_what_others_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor sent the beginnings of gradients of ever later steps. All layers were asked for
    anew, again and again, and the follower was never ready."""
    monkeypatch.setattr(arriving_gradients, "GRADIENTS_LIMIT_BYTES", 1 << 20)
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, name_of(2), line)
    found = view_of(1, 3)
    held = (HeldLayer(name_of(0), 0, 7), HeldLayer(name_of(1), 1, 7), HeldLayer(name_of(1), 0, 7))
    snapshot = msgspec.structs.replace(found.snapshot, planned=False, held=held, step=7)
    view = View(snapshot, found.plan)

    def first_chunk(layer: int, step: int) -> tuple[FrameHeader, bytearray]:
        count = min(CHUNK_ELEMENTS, workload_of(SPEC).cost(layer).parameter_count)
        at = (view.id.number, view.id.snapshot, step, FrameKind.LAYER_GRADIENT, 0, layer)
        return FrameHeader(*at, "fp32", "float32", (count,)), bytearray(4 * count)

    async def run() -> None:
        followers = Followers(tools, Outlet(), state)
        followers.follow(view, {0, 1})
        await settle()
        follower: Any = followers.follower
        assert follower._donor_of == {0: name_of(0), 1: name_of(1)}
        followers.gradient(name_of(1), *first_chunk(1, 7))
        asked = follower._request_of[name_of(1)]
        for step in range(8, 500):
            followers.gradient(name_of(0), *first_chunk(0, step))
            if follower._donor_of[0] != name_of(0):
                break
        assert follower._donor_of[0] == name_of(1), "others are asked for what it was to give"
        assert follower._replaying._gradients.has_later(1, 6), "what another has given is here"
        assert follower._request_of[name_of(1)] is asked
        followers.stop_following()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def test_a_donor_that_says_too_much_has_nothing_forgotten_that_others_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor told thousands of commits while other donors' states were still on their way. They
    could not be replayed, and were asked for anew, again and again."""
    monkeypatch.setattr(replaying, "COMMITTED_LIMIT", 4)
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, name_of(2), line)
    found = view_of(1, 3)
    held = (HeldLayer(name_of(0), 0, 7), HeldLayer(name_of(1), 1, 7))
    snapshot = msgspec.structs.replace(found.snapshot, planned=False, held=held, step=7)
    view = View(snapshot, found.plan)
    state.states[1] = LayerState.genesis(SPEC, 1)
    state.states[1].version = 7

    async def run() -> None:
        followers = Followers(tools, Outlet(), state)
        followers.follow(view, {0, 1})
        await settle()
        numbers = {min(request.layers): request.number for request in line.requests}
        followers.receive(name_of(1), LayersCommitted(view.id, numbers[1], 7, 1.0))
        for step in range(8, 100):
            followers.receive(name_of(0), LayersCommitted(view.id, numbers[0], step, 1.0))
        for frame in chunks(view, 1, 7):
            followers.gradient(name_of(1), *frame)
        followers.receive(name_of(1), LayerOffered(view.id, numbers[1], 1, 7, "", 0))
        for _ in range(100):
            await state.wait(0.05)
            if state.states[1].version == 8:
                break
        assert state.states[1].version == 8
        followers.stop_following()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 60))
    tools.compute.close()


def test_layers_of_any_size_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients of a step are here before it commits. For a stage of 135 million parameters
    these are more than may usually wait: with each step all was asked for anew."""
    monkeypatch.setattr(arriving_gradients, "GRADIENTS_LIMIT_BYTES", 1)
    blobs: Any = Blobs()
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, name_of(1), line, blobs)
    view = unplanned()
    state.states |= {layer: state_at(layer, 7) for layer in (0, 1)}

    async def run() -> None:
        followers = Followers(tools, Outlet(), state)
        followers.follow(view, {0, 1})
        await settle()
        number = line.requests[0].number
        for layer in (0, 1):
            followers.receive(name_of(0), LayerOffered(view.id, number, layer, 7, "", 0))
        await settle()
        for step in (7, 8):
            for layer in (0, 1):
                for frame in chunks(view, layer, step):
                    followers.gradient(name_of(0), *frame)
        for step in (7, 8):
            followers.receive(name_of(0), LayersCommitted(view.id, number, step, 1.0))
        while [state.states[layer].version for layer in (0, 1)] != [9, 9]:
            await state.wait(1.0)
            assert len(line.requests) == 1, "it is not asked for anew"
        followers.stop_following()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def test_what_others_than_their_holder_have_given_to_guard_is_confirmed_by_it(
    tmp_path: Path,
) -> None:
    """A holder that gave up a layer before the view began could give a guardian another state than
    it gave the new holder. Nobody saw it, and when the new holder died that state became
    everybody's."""
    me, holder, before = name_of(1), name_of(0), name_of(2)
    blobs: Any = Blobs()
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, me, line, blobs)
    found = view_of(1, 3)
    count = workload_of(SPEC).layer_count

    def held_by(peer_id: str) -> Plan:
        spares = tuple(it for it in (me, holder, before) if it != peer_id)
        pipeline = Pipeline((Stage(peer_id, 0, count, 1),), 0, SPEC.microbatches_per_step)
        return Plan((pipeline,), spares, 3_600_000_000_000)

    snapshot = msgspec.structs.replace(found.snapshot, step=6, present=held_by(before))
    view = View(snapshot, held_by(holder))
    assert view.cut_pace is None and view.guarded_by(me) == set(range(count)), "it keeps up"
    payload = {layer: state_at(layer, 7) for layer in range(count)}

    async def run() -> None:
        followers = Followers(tools, Outlet(), state)
        followers.follow(view, set(range(count)))
        await settle()
        for layer, made in payload.items():
            size_bytes, blob = len(made.to_bytes()), f"{layer:064x}"
            offer = LayerOffered(view.id, line.requests[0].number, layer, 7, blob, size_bytes)
            followers.receive(before, offer)
        while len(state.states) < count:
            await settle()
            for layer, made in payload.items():
                if (given := blobs.given.get(f"{layer:064x}")) is not None and not given.done():
                    given.set_result(made.to_bytes())
            await asyncio.sleep(0.01)
        state.view, state.step = view, 7
        followers.guard(view)
        await settle()
        guardian, asked = followers.guardian, line.requests[-1]
        assert guardian is not None and set(asked.layers.values()) == {7}
        (confirm,) = [it for it in line.confirms if set(it.layers) == set(range(count))][-1:]
        for layer in range(count):
            followers.receive(holder, LayerOffered(view.id, asked.number, layer, 7, "", 0))
            digest = payload[layer].file_digest() if layer else b"?" * 16
            said = StateDigest(view.id, confirm.number, layer, 7, digest)
            followers.receive(holder, said)
        for _ in range(500):
            await asyncio.sleep(0.01)
            if line.requests[-1] is not asked and guardian.missing == {0}:
                break
        assert guardian.missing == {0}, "all others are what it has"
        assert line.requests[-1].layers[0] == -1 and line.requests[-1].layers[1] == 7
        assert 0 not in state.states, "nobody is told that it is here"
        followers.stop_guarding()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 60))
    tools.compute.close()


def test_a_guardian_moves_nothing_on_by_a_step_that_is_not_committed_here(tmp_path: Path) -> None:
    """The holder had committed, and died; this peer still waited for another member's word. Its
    state of a step that it could not name counted for nobody. The step was computed again although
    it was told to be safe (seed 700021)."""
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, ME, line)
    view, _ = guarded(1, 7)
    state.states |= {layer: state_at(layer, 7) for layer in range(COUNT)}

    async def run() -> None:
        state.view, state.step = view, 7
        followers = Followers(tools, Outlet(), state)
        state.wake.clear()
        followers.guard(view)
        assert state.wake.is_set(), "who takes no steps lets it go in time (seed 700211)"
        await settle()
        number = line.requests[-1].number
        for layer in range(COUNT):
            followers.receive(HOLDER, LayerOffered(view.id, number, layer, 7, "", 0))
            for frame in chunks(view, layer, 7):
                followers.gradient(HOLDER, *frame)
        followers.receive(HOLDER, LayersCommitted(view.id, number, 7, 1.0))
        while set(state.reduced.get((view.id, 7), ())) != set(range(COUNT)):
            await state.wait(0.01)  # with which they can be moved on: one after the other
        assert {it.version for it in state.states.values()} == {7}
        state.step = 8
        followers.committed()
        while {it.version for it in state.states.values()} != {8}:
            await state.wait(1.0)
        followers.stop_guarding()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def test_what_nobody_wants_any_more_ends_no_guardian(tmp_path: Path) -> None:
    """A guardian goes on for a moment in the next view, for what it is to guard there, while a
    commit drops the rest. The daemon ended with a KeyError (seed 700216)."""
    line, state = Line(), TrainerState()
    tools = trainer_tools(tmp_path, ME, line)
    view, _ = guarded(1, 7)
    state.states |= {layer: state_at(layer, 7) for layer in range(COUNT)}

    async def run() -> None:
        state.view, state.step = view, 7
        followers = Followers(tools, Outlet(), state)
        followers.guard(view)
        await settle()
        number = line.requests[-1].number
        for layer in range(COUNT):
            followers.receive(HOLDER, LayerOffered(view.id, number, layer, 7, "", 0))
        await settle()
        del state.states[0]
        state.step = 8
        for layer in range(COUNT):
            for frame in chunks(view, layer, 7):
                followers.gradient(HOLDER, *frame)
        followers.receive(HOLDER, LayersCommitted(view.id, number, 7, 1.0))
        while {it.version for it in state.states.values()} != {8}:
            await state.wait(1.0)  # raises what has ended the guardian
        assert 0 not in state.states
        followers.stop_guarding()
        await settle()

    asyncio.run(asyncio.wait_for(run(), 20))
    tools.compute.close()


def chunks(view: View, layer: int, step: int) -> Iterator[tuple[FrameHeader, bytearray]]:
    """The chunks of a layer's gradient, as they travel."""
    length = workload_of(SPEC).cost(layer).parameter_count
    for index, start in enumerate(range(0, length, CHUNK_ELEMENTS)):
        count = min(CHUNK_ELEMENTS, length - start)
        at = (view.id.number, view.id.snapshot, step, FrameKind.LAYER_GRADIENT, index, layer)
        yield FrameHeader(*at, "fp32", "float32", (count,)), bytearray(4 * count)
