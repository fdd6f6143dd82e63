"""A peer that waits goes on giving states to those that wait for them, and hears what arrives."""

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import pytest
import torch

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import HeldLayer, ViewId
from p2p_dtfm.core.recovery.receipts import Receipts
from p2p_dtfm.core.recovery.recovery_evidence import RecoveryEvidence, Restart
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import FollowLayers, LayerOffered
from p2p_dtfm.daemon.state_transfer import witnesses
from p2p_dtfm.daemon.state_transfer.following.donor_choice import donors_of
from p2p_dtfm.daemon.state_transfer.following.rolled_layers import unlike_layers
from p2p_dtfm.daemon.state_transfer.witnesses import StateVotes
from p2p_dtfm.daemon.step.mailbox import Mailbox
from p2p_dtfm.daemon.telemetry.run_history import RunHistory
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer import step_shards
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.place import PlaceInView
from p2p_dtfm.daemon.trainer.step_loop import StepLoop
from p2p_dtfm.daemon.trainer.step_shards import StepShards, have_shards
from p2p_dtfm.daemon.trainer.step_waits import StepWaits
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Stopped, Tools, TrainerState
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from p2p_dtfm.train.data import BlobStore, ShardDamaged, ShardUnreadable
from p2p_dtfm.train.model.checkpoint import layer_path
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.tensor_bytes import tensor_to_bytes
from tests.core.planning import name_of
from tests.daemon.trainer_parts import ME, SPEC, QuietOutlet, settle, trainer_tools, view_of
from tests.e2e.test_parity import even_plan

STEP = 7
OTHER = name_of(1)
VIEW = view_of(1, 2)
PLAN = VIEW.plan
assert isinstance(PLAN, Plan)
MINE, THEIRS = PLAN.layers_of(ME), PLAN.layers_of(OTHER)


class Line:
    """A messenger and bulk plane that keep what is said."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    async def ask(self, peer_id: str, message: Any) -> None:
        self.told.append(message)

    def tell(self, peer_id: str, message: Any) -> None:
        self.told.append(message)

    async def send(self, peer_id: str, lane: str, header: Any, payload: Any) -> None:
        self.told.append(header)

    async def heard(self, *kinds: type) -> list[Any]:
        """What is told of these kinds, as soon as there is any."""
        while not (found := [item for item in self.told if isinstance(item, kinds)]):
            await asyncio.sleep(0.01)
        return found


@dataclass
class Parts:
    tools: Tools
    line: Line
    state: TrainerState
    followers: Followers
    place: PlaceInView
    outlet: Outlet

    @property
    def loop(self) -> StepLoop:
        cuts = Cuts(self.tools, self.outlet, self.state)
        history = RunHistory(SPEC, self.tools.status)
        of_place = (self.state, self.place, self.followers, cuts, history)
        return StepLoop(self.tools, self.outlet, *of_place)


def state_of(layer: int, version: int = STEP) -> LayerState:
    made = LayerState.genesis(SPEC, layer)
    made.version = version
    return made


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    """Run scenarios with the parts of a peer that is in the view, at its first step."""

    def run(scenario: Callable[[Parts], Awaitable[None]]) -> None:
        line, outlet = Line(), QuietOutlet()
        tools = trainer_tools(tmp_path, ME, line)
        state = TrainerState()
        state.view, state.step = VIEW, STEP

        async def whole() -> None:
            followers = Followers(tools, outlet, state)
            place = PlaceInView(tools, outlet, state, followers, Cuts(tools, outlet, state))
            tools.stores.donor.take_over(VIEW)
            try:
                await scenario(Parts(tools, line, state, followers, place, outlet))
            finally:
                followers.stop_following()
                followers.stop_guarding()
                tools.stores.donor.close()
                tools.compute.close()

        asyncio.run(asyncio.wait_for(whole(), 20))

    return run


def test_who_waits_for_prepared_gives_states_to_who_must_still_prepare(
    play: Callable[..., None],
) -> None:
    """After a failure all of this peer's part was kept, and the peer that takes the lost place asks
    late."""

    async def scenario(parts: Parts) -> None:
        assert isinstance(VIEW.plan, Plan)
        state = parts.state
        state.states[THEIRS[0]] = state_of(THEIRS[0])
        state.ledger = Ledger(VIEW.id, VIEW.plan, STEP)
        await gives_while(parts, parts.loop._outcome(VIEW, STEP, {}))

    play(scenario)


def test_who_waits_for_the_others_claims_gives_states_to_who_must_still_claim(
    play: Callable[..., None],
) -> None:
    """The last look at the model needs nothing of the peer that takes a place. The others waited
    for its claims, and it for their states, until it was thrown out."""

    async def scenario(parts: Parts) -> None:
        parts.state.states[THEIRS[0]] = state_of(THEIRS[0])
        audits = parts.loop.audits
        await gives_while(parts, audits._until(VIEW, Kind.CLAIM, lambda: (OTHER,)))

    play(scenario)


def test_who_was_given_states_before_a_commit_gets_the_gradients_of_that_step(
    play: Callable[..., None],
) -> None:
    """All Prepared may be here by then. The follower waited for a step that nobody sent."""

    async def scenario(parts: Parts) -> None:
        layer, state = THEIRS[0], parts.state
        state.states[layer] = state_of(layer)
        parts.followers.receive(OTHER, FollowLayers(VIEW.id, 1, {layer: -1}, False))
        await parts.place.offer_states()
        outcome = StepOutcome(STEP, 1.0, 2.0, 64, None, None)
        state.ledger = cast(Ledger, SimpleNamespace(next_outcome=lambda: outcome))
        gradient = state.states[layer].gradient_vector()
        await parts.loop._outcome(VIEW, STEP, {layer: gradient})
        (header,) = await asyncio.wait_for(parts.line.heard(FrameHeader), 5)
        assert (header.layer, header.step) == (layer, STEP)

    play(scenario)


def test_who_lost_its_place_before_its_layers_came_brings_those_of_the_next_view(
    play: Callable[..., None],
) -> None:
    """A machine slept as it was let in (virtual seed 990009). Let in again, it waited for the view
    that it had lost to settle, and the others for its states, again and again."""

    async def scenario(parts: Parts) -> None:
        again = view_of(3, 2)
        assert VIEW.snapshot.planned and again.snapshot.planned
        parts.place.take_over(VIEW)
        parts.place.agreed(again, False)
        assert not parts.followers.brought_for(again), "not before the present one has started"
        parts.state.view = None
        parts.place.leave_views()
        assert not parts.followers.brought_for(again)
        parts.place.agreed(view_of(5, 2), False)
        assert parts.followers.brought_for(view_of(5, 2)) == set(MINE)

    play(scenario)


def test_who_waits_for_data_gives_states_meanwhile(play: Callable[..., None]) -> None:
    class Thin(QuietOutlet):
        async def fetch_shards(self, digests: set[str]) -> None:
            await asyncio.sleep(60)

    async def scenario(parts: Parts) -> None:
        parts.state.states[THEIRS[0]] = state_of(THEIRS[0])
        parts.outlet = Thin()
        shards = StepShards(STEP, (0, 1), held_out=False)
        await gives_while(parts, parts.loop._have_shards(VIEW, PLAN, shards))
        fetching = asyncio.create_task(parts.loop._have_shards(VIEW, PLAN, shards))
        await asyncio.sleep(0)
        parts.state.stopped = True
        parts.state.wake.set()
        with pytest.raises(Stopped):  # the next view may want something else of it
            await asyncio.wait_for(fetching, 5)

    play(scenario)


def test_data_that_are_fetched_no_more_say_nothing_of_the_next_view(
    play: Callable[..., None],
) -> None:
    """In the next view the peer said of itself that nothing is on its way to it, while states
    were."""

    class Thin(QuietOutlet):
        async def fetch_shards(self, digests: set[str]) -> None:
            await asyncio.sleep(60)

    async def scenario(parts: Parts) -> None:
        state, shards = parts.state, StepShards(STEP, (0, 1), held_out=False)
        fetching = asyncio.create_task(have_shards(parts.tools, Thin(), state, VIEW, PLAN, shards))
        await asyncio.sleep(0)
        assert state.fetches
        state.view = view_of(2, 1)
        fetching.cancel()
        await asyncio.wait({fetching})
        assert state.fetches

    play(scenario)


def test_who_lacks_data_that_nobody_gives_stands_still_until_they_come(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that waits for the step's end would wait for ever, even to leave."""
    monkeypatch.setattr(step_shards, "SHARD_RETRY_S", 0.01)

    class Nobody(QuietOutlet):
        gives = False

        async def fetch_shards(self, digests: set[str]) -> None:
            if not self.gives:
                raise BlobUnavailable(min(digests), {})

    async def scenario(parts: Parts) -> None:
        state, outlet, shards = parts.state, Nobody(), StepShards(STEP, (0, 1), held_out=False)
        fetching = asyncio.create_task(have_shards(parts.tools, outlet, state, VIEW, PLAN, shards))
        while not state.stands_still:
            await asyncio.sleep(0.01)
        assert not fetching.done()
        outlet.gives = True
        await asyncio.wait_for(fetching, 5)
        assert not state.stands_still

    play(scenario)


def test_a_shard_that_cannot_be_read_any_more_is_fetched_again_before_the_step(
    play: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_shards, "SHARD_RETRY_S", 0.01)
    blobs = BlobStore(tmp_path / "data" / "blobs")

    class Mends(QuietOutlet):
        asked: ClassVar[list[str]] = []

        def damaged_shard(self, digest: str) -> bool:
            self.asked.append(digest)
            is_aside = blobs.quarantine(digest) is not None
            blobs.put_bytes(whole[digest])
            return is_aside

    async def scenario(parts: Parts) -> None:
        state, outlet = parts.state, Mends()
        for step in (STEP, STEP + 1):
            shards = StepShards(step, (0, 1), held_out=False)
            await have_shards(parts.tools, outlet, state, VIEW, PLAN, shards)
            for digest in blobs.digests():
                whole[digest] = blobs.held(digest).read_bytes()
                if step == STEP:
                    os.truncate(blobs.held(digest), 7)
        assert outlet.asked
        parts.tools.batches(STEP + 1, 0)

    whole: dict[str, bytes] = {}
    play(scenario)


def test_a_shard_that_cannot_be_read_is_read_again_and_replaced_by_what_others_give(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that failed for a moment put data aside of which this was the only copy. One that
    could only be read by then ended the daemon. One that took nothing read the data no more."""
    monkeypatch.setattr(step_shards, "SHARD_RETRY_S", 0.01)

    class OneDisk(QuietOutlet):
        gives, asked, aside = False, 0, 0

        def __init__(self, takes: bool = True) -> None:
            self.takes = takes

        async def replace_shard(self, digest: str) -> None:
            self.asked += 1
            if not self.takes:
                raise OSError(errno.EROFS, "Read-only file system")
            if not self.gives:
                raise BlobUnavailable(digest, {})

        def damaged_shard(self, digest: str) -> bool:
            self.aside += 1
            return False

    async def scenario(
        parts: Parts, error: type[ShardDamaged] | type[ShardUnreadable], takes: bool = True
    ) -> None:
        state, outlet = parts.state, OneDisk(takes)
        shards = StepShards(STEP, (0, 1), held_out=False)

        def read(*asked: Any, **more: Any) -> None:
            if not outlet.gives:
                raise error("digest", Path("shard"), "is not to be read")

        monkeypatch.setattr(parts.tools.batches, "read_ahead", read)
        fetching = asyncio.create_task(have_shards(parts.tools, outlet, state, VIEW, PLAN, shards))
        while outlet.asked < 2 and not fetching.done():
            await asyncio.sleep(0.01)
        assert bool(outlet.aside) == (error is ShardDamaged), "what may be sound is not put aside"
        assert state.stuck_at == state.step, "it says so, and holds nobody up who is to leave"
        outlet.gives = True
        await asyncio.wait_for(fetching, 5)

    play(partial(scenario, error=ShardUnreadable))
    play(partial(scenario, error=ShardDamaged))
    for error in (ShardUnreadable, ShardDamaged):
        play(partial(scenario, error=error, takes=False))


async def gives_while(parts: Parts, waits: Coroutine[Any, Any, object]) -> None:
    """A peer follows during that wait."""
    waiting = asyncio.create_task(waits)
    await asyncio.sleep(0)
    parts.followers.receive(OTHER, FollowLayers(VIEW.id, 1, {THEIRS[0]: -1}, True))
    (offer,) = await asyncio.wait_for(parts.line.heard(LayerOffered), 5)
    assert (offer.layer, offer.version) == (THEIRS[0], STEP) and not waiting.done()
    waiting.cancel()


def test_who_says_nothing_of_many_layers_is_waited_for_once(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seconds for each layer were more than the others had patience for."""
    monkeypatch.setattr(witnesses, "LIMIT_S", 0.5)
    layers = tuple(range(layer_count(SPEC)))
    earlier = view_of(VIEW.id.number - 1, 2).plan
    view = View(msgspec.structs.replace(VIEW.snapshot, present=earlier), VIEW.plan)

    async def scenario(parts: Parts) -> None:
        parts.state.states.update({layer: state_of(layer) for layer in layers})
        follower = parts.followers._new(view, layers, parts.followers._changed, lambda *_: None)
        tools, began_s = follower._tools, asyncio.get_running_loop().time()
        givers = dict.fromkeys(layers, "")
        assert not await unlike_layers(view, tools, StateVotes(), givers, STEP)
        assert parts.line.told
        assert asyncio.get_running_loop().time() - began_s < 0.5 * (len(layers) - 2)

    play(scenario)


def test_a_guardian_that_becomes_a_holder_goes_on_as_soon_as_it_has_caught_up(
    play: Callable[..., None],
) -> None:
    async def scenario(parts: Parts) -> None:
        state, followers = parts.state, parts.followers
        for layer in MINE:
            state.states[layer] = state_of(layer)
        late = MINE[0]
        state.states[late].version = STEP - 1
        earlier = msgspec.structs.replace(VIEW.snapshot, number=VIEW.id.number - 1)
        before = View(earlier, even_plan([OTHER, ME], (2,), SPEC))
        followers.guardian = followers._new(before, {late}, followers._changed, lambda *_: None)
        followers.guardian.missing.clear()
        waiting = asyncio.create_task(parts.place.have_states(VIEW, PLAN))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert parts.tools.status.reason.startswith("waits for 1 layer as of step")
        state.states[late].version = STEP
        followers._changed()
        await asyncio.wait_for(waiting, 2)
        assert parts.tools.status.reason.startswith("its layers are here"), "it went on saying so"

    play(scenario)


def test_what_does_not_come_is_asked_for_though_other_layers_are_on_their_way(
    play: Callable[..., None],
) -> None:
    held = tuple(HeldLayer(OTHER, layer, STEP) for layer in MINE)
    view = View(msgspec.structs.replace(VIEW.snapshot, held=held, planned=False), VIEW.plan)

    async def scenario(parts: Parts) -> None:
        parts.state.view = view
        parts.followers.follow(view, {MINE[0]})
        waiting = asyncio.create_task(parts.place.have_states(view, PLAN))
        asked: set[int] = set()
        while asked != set(MINE):
            await asyncio.sleep(0.01)
            asked = {n for m in parts.line.told if isinstance(m, FollowLayers) for n in m.layers}
        waiting.cancel()

    assert len(MINE) > 1
    play(scenario)


def test_a_gradient_of_another_view_is_nobodys(play: Callable[..., None]) -> None:
    async def scenario(parts: Parts) -> None:
        followers, layer = parts.followers, THEIRS[0]
        parts.state.states[layer] = state_of(layer)
        received: list[tuple[int, float]] = []

        def on_gradient(holder: str, layer: int, step: int, gradient: torch.Tensor) -> None:
            received.append((step, float(gradient.abs().max())))

        followers.guardian = followers._new(VIEW, {layer}, followers._changed, on_gradient)
        await parts.line.heard(FollowLayers)
        followers.receive(OTHER, LayerOffered(VIEW.id, 1, layer, STEP, "", 0))
        while followers.guardian.missing:
            await asyncio.sleep(0.01)
        gradient = parts.state.states[layer].gradient_vector()
        header = FrameHeader(
            view_number=VIEW.id.number - 1,
            view_digest=VIEW.id.snapshot,
            step=STEP,
            kind=FrameKind.LAYER_GRADIENT,
            index=0,
            layer=layer,
            codec="fp32",
            dtype="float32",
            shape=tuple(gradient.shape),
        )
        for number, value in ((VIEW.id.number - 1, 1.0), (VIEW.id.number, 2.0)):
            payload = bytearray(tensor_to_bytes(torch.full_like(gradient, value)))
            of_view = msgspec.structs.replace(header, view_number=number)
            followers.gradient(OTHER, of_view, payload)
            await settle()  # the first one would be taken in the first of these turns
        while not received:
            await asyncio.sleep(0.01)
        assert received == [(STEP, 2.0)]

    play(scenario)


def test_where_the_holders_of_before_are_gone_those_of_the_view_are_asked(
    play: Callable[..., None],
) -> None:
    """The peer asked a member that had left, again and again, beside a fellow that has the
    layer."""
    gone = name_of(5)
    snapshot = msgspec.structs.replace(VIEW.snapshot, present=even_plan([gone], (1,), SPEC))
    view = View(snapshot, even_plan([ME, OTHER], (1, 1), SPEC))
    asked: list[str] = []

    async def scenario(parts: Parts) -> None:
        async def ask(peer_id: str, message: Any) -> None:
            asked.append(peer_id)
            if peer_id == gone:
                raise Unreachable(peer_id, "gone")

        parts.line.ask = ask  # type: ignore[method-assign]
        parts.state.view = view
        parts.followers.follow(view, {0})
        while OTHER not in asked and len(asked) < 3:
            await asyncio.sleep(0.01)
        assert asked == [gone, OTHER]

    play(scenario)


def test_of_what_is_damaged_on_this_disk_the_others_are_told_that_it_is_not_here(
    play: Callable[..., None],
) -> None:
    """A power cut may damage the file. The daemon ended, at each start, for as long as the others
    counted on that file."""

    class Outlet(QuietOutlet):
        def __init__(self) -> None:
            self.told: list[str] = []

        def contradiction(self, reason: str) -> None:
            self.told.append(reason)

    async def scenario(parts: Parts) -> None:
        outlet, checkpoints = Outlet(), parts.tools.stores.checkpoints
        trainer = Trainer(parts.tools, outlet)
        await checkpoints.save(STEP, {layer: state_of(layer) for layer in (0, 1)}, "lineage")
        ((blob, (where, _)),) = [it for it in checkpoints._here._places.items() if it[1][1] == 1]
        path = layer_path(where, 1)
        path.write_bytes(bytes(path.stat().st_size))
        trainer._state.step = STEP
        trainer._state.restarts.append((Restart(load=(0, 1)), STEP))
        await trainer._restarting.do(*trainer._state.restarts[0])
        assert {n: it.version for n, it in trainer.states.items()} == {0: STEP}
        assert outlet.told == ["layers [1] of step 7 are damaged here"]
        assert [it.layers for it in checkpoints.saved] == [(0,)]
        assert checkpoints.path_of(blob) is None
        await checkpoints.save(STEP, {1: state_of(1)}, "lineage")
        assert [it.layers for it in checkpoints.saved] == [(0, 1)]
        await checkpoints.close()

    play(scenario)


def test_what_one_view_makes_of_the_states_is_done_before_what_the_next_one_does(
    play: Callable[..., None],
) -> None:
    """Two views fail one after the other, while this peer still saves, or writes states for others.
    It told the second view that it has what the first one was to make of its states."""

    async def scenario(parts: Parts) -> None:
        trainer, saved = Trainer(parts.tools, parts.outlet), STEP - 2
        layers = {layer: state_of(layer, saved) for layer in (0, 1)}
        await parts.tools.stores.checkpoints.save(saved, layers, "lineage")
        trainer.adopt({0: state_of(0)}, STEP)
        for number, restart in ((2, Restart(load=(0, 1), discard=(0,))), (3, Restart())):
            snapshot = msgspec.structs.replace(VIEW.snapshot, number=number, planned=False)
            trainer.take_over(View(snapshot, NoPlan("nobody else")), saved, None, restart)
            assert trainer.held is None
        running = asyncio.create_task(trainer.run())
        while trainer.held is None and not running.done():
            await asyncio.sleep(0.01)
        running.cancel()
        assert trainer.held == {0: saved, 1: saved}
        await parts.tools.stores.checkpoints.close()

    play(scenario)


@pytest.mark.parametrize("reason", ["", "nobody has room"])
def test_who_reads_its_layers_after_a_failure_says_so(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """For minutes, with large layers, it said that the members agree on how to go on. Where they
    agreed that no steps can happen, its reason stays."""

    async def scenario(parts: Parts) -> None:
        trainer, status, said = Trainer(parts.tools, parts.outlet), parts.tools.status, list[str]()

        async def load(layer: int, step: int) -> LayerState:
            said.append(f"{status.state}: {status.reason}")
            if layer == 1:
                trainer.stop_step()
                status.say(State.WAITING, "another failure")
            return state_of(layer, step)

        monkeypatch.setattr(parts.tools.stores.checkpoints, "load", load)
        status.say(State.WAITING, reason or "a failure: the members agree on how to go on")
        snapshot = msgspec.structs.replace(VIEW.snapshot, number=3, planned=False)
        plan = NoPlan(reason) if reason else VIEW.plan
        trainer.take_over(View(snapshot, plan), STEP, None, Restart(load=(0, 1, 2)))
        await trainer._restarting.do(*trainer._state.restarts[0])
        reads = f"waiting: {reason}" if reason else "syncing: reads 3 layers as of step 7"
        assert said == [reads, reads, "waiting: another failure"]
        await trainer.close()

    play(scenario)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_who_begins_another_life_puts_back_nothing_that_it_still_reads(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """Large layers take many seconds. States of the life before overwrote those of this life, and a
    step that was to be rolled forward from there ended the daemon."""

    async def scenario(parts: Parts) -> None:
        trainer, opens = Trainer(parts.tools, parts.outlet), asyncio.Event()
        told: list[str] = []
        monkeypatch.setattr(parts.outlet, "contradiction", told.append)

        async def load(layer: int, step: int) -> LayerState:
            await opens.wait()
            if is_damaged:
                raise UserError("it is damaged")
            return state_of(layer, step)

        monkeypatch.setattr(parts.tools.stores.checkpoints, "load", load)
        trainer._state.step = STEP
        outcome = StepOutcome(STEP - 1, 1.0, 2.0, 64, None, None)
        restart = Restart((1,), outcome, rolled_view=VIEW.id, load=(0,))
        trainer._state.restarts.append((restart, STEP))
        restarting = asyncio.create_task(trainer._restarting.do(*trainer._state.restarts[0]))
        await asyncio.sleep(0)
        trainer.view_agreed(view_of(9, 2), True)
        opens.set()
        await asyncio.wait_for(restarting, 5)
        assert trainer.states == {} and trainer.held == {}
        trainer._state.restarts.append((Restart(), STEP))
        await trainer._restarting.do(*trainer._state.restarts[0])
        assert not told, "what was damaged in the life before is no concern of this one's"
        await trainer.close()

    play(scenario)


def test_of_a_step_that_fails_again_and_again_the_last_gradients_are_kept(
    play: Callable[..., None],
) -> None:
    """The gradients of each view were kept until a step committed: four bytes of each parameter for
    each view."""
    evidence, view = RecoveryEvidence(), [view_of(1, 2)]
    evidence.lineage.move_to(STEP, "aa")

    class Outlet(QuietOutlet):
        def reduced(self, step: int, layers: set[int]) -> frozenset[tuple[ViewId, int]]:
            evidence.reduced(view[0].id, step, layers)
            return evidence.rollable_steps

    async def scenario(parts: Parts) -> None:
        parts.outlet, state, gradient = Outlet(), parts.state, torch.zeros(1)
        loop, (first, *others) = parts.loop, [view_of(number, 2) for number in range(1, 6)]
        loop._keep_reduced(first, STEP, {0: gradient})
        evidence.committed(first.id, StepOutcome(STEP, 1.0, 2.0, 64, None, None), range(0))
        state.forget_reduced(STEP)
        for view[0] in others[:3]:
            loop._keep_reduced(view[0], STEP + 1, {0: gradient})
            loop._keep_reduced(view[0], STEP + 1, {1: gradient})
        kept = {(first.id, STEP), (view[0].id, STEP + 1)}
        assert state.reduced.keys() == kept and set(state.reduced[view[0].id, STEP + 1]) == {0, 1}
        state.restarts.append((Restart(rolled_view=view[0].id), STEP + 2))
        view[0] = others[3]
        loop._keep_reduced(view[0], STEP + 1, {0: gradient})
        assert state.reduced.keys() > kept, "what is due may still name it"

    play(scenario)


def test_who_waits_for_given_weights_looks_whether_its_view_is_over(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No member may have the weights any more, and the peer's next place may not need them."""

    async def scenario(parts: Parts) -> None:
        async def state(layer: int) -> LayerState:
            await asyncio.sleep(60)
            return state_of(layer, 0)

        monkeypatch.setattr(parts.tools.stores.initial, "state", state)
        parts.state.step = 0
        waiting = asyncio.create_task(parts.place.have_states(VIEW, PLAN))
        await asyncio.sleep(0)
        parts.state.stopped = True
        parts.state.wake.set()
        with pytest.raises(Stopped):
            await asyncio.wait_for(waiting, 5)

    play(scenario)


def test_a_view_may_be_over_before_all_states_are_written_with_which_a_step_begins(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer wrote large states for a member that was about to come. The step went on as planned in
    that view, with what the next view keeps of it."""

    async def scenario(parts: Parts) -> None:
        async def offer_states() -> None:
            parts.state.view = view_of(2, 1)

        monkeypatch.setattr(parts.place, "offer_states", offer_states)
        engine: Any = SimpleNamespace(states={})
        with pytest.raises(Stopped):
            await parts.loop._one_step(VIEW, PLAN, engine)

    play(scenario)


def test_who_goes_with_an_unplanned_view_is_not_asked_for_states() -> None:
    gone = HeldLayer("a peer that leaves", 0, STEP)
    held = (gone, HeldLayer(OTHER, 0, STEP))
    snapshot = msgspec.structs.replace(VIEW.snapshot, planned=False, held=held)
    assert donors_of(View(snapshot, NoPlan("too few")), 0, ME) == [OTHER]


def test_whose_layers_are_all_here_does_not_say_that_it_waits_for_them(
    play: Callable[..., None],
) -> None:
    """The peer is in no view yet: the next one takes over when the others come to it."""

    async def scenario(parts: Parts) -> None:
        parts.state.view = None
        parts.followers.follow(VIEW, {THEIRS[0]})
        follower = parts.followers.follower
        assert follower is not None
        parts.followers._progress()
        assert "1 of 1 layers to fetch" in parts.tools.status.reason
        follower.missing.clear()
        parts.followers._progress()
        assert "its layers are here" in parts.tools.status.reason

    play(scenario)


def test_a_stage_lies_where_it_is_computed_and_what_is_guarded_does_not(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = torch.device("cuda", 0)
    moved: dict[int, torch.device | None] = {}
    monkeypatch.setattr(LayerState, "move", lambda state, to: moved.update({state.layer: to}))

    async def scenario(parts: Parts) -> None:
        parts.tools.compute.device = card
        parts.state.states.update({layer: state_of(layer) for layer in (*MINE, *THEIRS)})
        await parts.place.have_states(VIEW, PLAN)

    play(scenario)
    assert moved == {**dict.fromkeys(MINE, card), **dict.fromkeys(THEIRS)}


@pytest.mark.parametrize("steps_happen", [True, False])
def test_of_what_comes_again_nothing_is_remembered_and_of_what_stays_all(
    steps_happen: bool, play: Callable[..., None]
) -> None:
    """Others have moved a layer on meanwhile, and what this peer owed to it before was added."""
    both = even_plan([ME, OTHER], (1, 1), SPEC)

    async def scenario(parts: Parts) -> None:
        state, following = parts.state, VIEW.id.number + 1
        state.view = VIEW if steps_happen else View(VIEW.snapshot, NoPlan("too few"))
        state.states.update({layer: state_of(layer) for layer in (*MINE, *THEIRS)})
        state.states[late := THEIRS[-1]].version = STEP - 1
        owed, moments = state.memory.owed, state.memory.moments
        moment: Any = None
        owed.propose(1, dict.fromkeys((*MINE, *THEIRS), torch.ones(1)))
        moments.propose(1, dict.fromkeys((*MINE, *THEIRS), moment))
        state.memory.commit(1)
        snapshot = msgspec.structs.replace(VIEW.snapshot, number=following, planned=True)
        parts.place.agreed(View(snapshot, both), False)
        kept = {layer for layer in (*MINE, *THEIRS) if owed.of(layer) is not None}
        assert kept == (set(MINE) if steps_happen else {*MINE, *THEIRS} - {late})
        assert moments._held.keys() == kept

    play(scenario)


def test_a_tensor_that_is_lost_after_its_view_costs_the_next_one_nothing(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane takes ten seconds not to open. Another peer had died meanwhile, and the next view
    trained. Its step was stopped for a tensor of the view before, and of two such tensors the
    second had the receiver accused."""
    sends, fails, told = asyncio.Event(), asyncio.Event(), list[str]()

    class Told(QuietOutlet):
        def trouble(self, peer_id: str, cause: str) -> None:
            told.append(peer_id)

    async def send(peer_id: str, lane: str, header: Any, payload: Any) -> None:
        sends.set()
        await fails.wait()
        raise Unreachable(peer_id, "no answer to a hello")

    async def scenario(parts: Parts) -> None:
        monkeypatch.setattr(parts.line, "send", send)
        parts.outlet = Told()
        parts.state.states |= {layer: state_of(layer) for layer in MINE}
        for next_view, lost in ((VIEW, True), (view_of(2, 2), False)):
            sends.clear(), fails.clear(), told.clear()
            parts.state.view, parts.state.stopped = VIEW, False
            mailbox = Mailbox(VIEW.id, PLAN, ME, SPEC)
            running = asyncio.create_task(parts.loop.run(VIEW, PLAN, mailbox))
            await asyncio.wait_for(sends.wait(), 10)
            parts.state.view = next_view
            fails.set()
            await until_told(told)
            parts.state.stopped = True
            parts.state.wake.set()
            with pytest.raises(Stopped):
                await asyncio.wait_for(running, 5)
            assert bool(told) == lost

    async def until_told(told: list[str]) -> None:
        for _ in range(20):
            if not told:
                await asyncio.sleep(0.01)

    play(scenario)


def test_who_saves_a_checkpoint_does_not_say_that_it_waits_for_its_guardian(
    play: Callable[..., None],
) -> None:
    """A guardian owes nothing of a step whose gradients are not there yet. It was named while its
    holder saved, or wrote states for others. A large stage takes longer for that than a guardian
    may for a receipt, so all that waited for the holder, and the holder itself, accused it."""

    async def scenario(parts: Parts) -> None:
        assert isinstance(VIEW.plan, Plan)
        loop, state = parts.loop, parts.state
        state.ledger = Ledger(VIEW.id, VIEW.plan, STEP)
        parts.followers.receipts = receipts = Receipts(VIEW.id, {MINE[0]: OTHER}, MINE)
        receipts.receipt(OTHER, VIEW.id, STEP - 1, (MINE[0],))
        waits = StepWaits(parts.tools, state, loop, parts.followers)
        assert waits._lacks(()) == ()
        guarding = asyncio.create_task(loop._guarded(VIEW, PLAN, STEP, {}))
        await settle()
        assert waits._lacks(()) == (Lack(OTHER, Kind.RECEIPT),)
        receipts.receipt(OTHER, VIEW.id, STEP, (MINE[0],))
        state.wake.set()
        await asyncio.wait_for(guarding, 5)
        assert waits._lacks(()) == ()

    play(scenario)
