"""A donor gives states to members whose place needs them. They cost a step once, however often they
are asked for."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import (
    ConfirmLayers,
    FollowDone,
    FollowEnded,
    FollowLayers,
    LayerOffered,
    LayerReceipt,
    StateDigest,
)
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.planning import name_of
from tests.daemon.trainer_parts import ME, SPEC, QuietOutlet, settle, trainer_tools, view_of
from tests.e2e.test_parity import even_plan

STEP = 7
VIEW = view_of(3, 3)
HOLDER, SPARE = name_of(2), "a spare"
LAYERS = range(6)
NUMBERS = itertools.count(1)


def view_after(number: int, peers: list[str], planned: bool = True) -> View:
    """A view in which each of these peers holds a part of the layers."""
    plan = even_plan(peers, (len(peers),), SPEC)
    assert isinstance(VIEW.plan, Plan)
    found = view_of(number, max(len(peers), len(VIEW.members))).snapshot
    goes_on = {"planned": planned, "present": VIEW.plan, "previous": VIEW.id}
    return View(msgspec.structs.replace(found, **goes_on), plan)


NEWCOMER = name_of(3)
NEXT = view_after(4, [name_of(1), name_of(0), HOLDER, NEWCOMER])
"""Two members change places, and one comes in."""
FAILURE = view_after(4, [ME, HOLDER], planned=False)


class Line:
    def __init__(self) -> None:
        self.told: list[Any] = []

    async def ask(self, peer_id: str, message: Any) -> None: ...

    def tell(self, peer_id: str, message: Any) -> None:
        self.told.append(message)

    async def send(self, peer_id: str, lane: str, header: Any, payload: Any) -> None: ...

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]


@dataclass
class Giving:
    """A member that has the state of every layer."""

    trainer: Trainer
    line: Line
    written: list[int]
    """Layers whose state was made into bytes."""
    hashed: list[int]
    offered: Path

    def asks(
        self, peer_id: str, view: ViewId, layers: Any, from_takeover: bool = False
    ) -> FollowLayers:
        message = FollowLayers(view, next(NUMBERS), dict.fromkeys(layers, -1), from_takeover)
        self.trainer.following(peer_id, message)
        return message

    async def boundary(self) -> None:
        await self.trainer._place.offer_states()
        await settle()

    async def commits(self) -> None:
        state = self.trainer._state
        outcome = StepOutcome(state.step, 1.0, 1.0, 1, None, None)
        self.trainer._tools.stores.donor.committed(outcome)
        state.step += 1
        for held in state.states.values():
            held.version = state.step
        await self.boundary()

    def files(self) -> int:
        return len(list(self.offered.glob("*"))) if self.offered.exists() else 0


Play = Callable[[Callable[[Giving], Awaitable[None]]], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    written: list[int] = []
    hashed: list[int] = []
    to_bytes, file_digest = LayerState.to_bytes, LayerState.file_digest

    def writes(state: LayerState) -> memoryview:
        written.append(state.layer)
        return to_bytes(state)

    def hashes(state: LayerState) -> bytes:
        hashed.append(state.layer)
        return file_digest(state)

    monkeypatch.setattr(LayerState, "to_bytes", writes)
    monkeypatch.setattr(LayerState, "file_digest", hashes)

    def run(scenario: Callable[[Giving], Awaitable[None]]) -> None:
        line = Line()
        tools = trainer_tools(tmp_path, ME, line)

        async def whole() -> None:
            trainer = Trainer(tools, QuietOutlet())
            trainer.take_over(VIEW, STEP, None, None)
            for layer in LAYERS:
                trainer.states[layer] = LayerState.genesis(SPEC, layer)
                trainer.states[layer].version = STEP
            try:
                await scenario(Giving(trainer, line, written, hashed, tmp_path / "offers"))
            finally:
                await trainer.close()
                tools.compute.close()

        asyncio.run(asyncio.wait_for(whole(), 20))

    return run


def test_layers_that_its_place_does_not_need_are_given_to_nobody(play: Play) -> None:
    async def scenario(donor: Giving) -> None:
        donor.trainer.view_agreed(NEXT, False)
        for view, from_takeover in itertools.product((VIEW.id, NEXT.id), (False, True)):
            for peer_id, layers in ((SPARE, LAYERS), (HOLDER, LAYERS), (HOLDER, [0])):
                with pytest.raises(PeerFault, match="its place"):
                    donor.asks(peer_id, view, layers, from_takeover)
            with pytest.raises(PeerFault, match="its place"):
                donor.trainer.following(SPARE, ConfirmLayers(view, 1, (0,)))
        await donor.boundary()
        assert not donor.written and not donor.hashed and not donor.line.told

    play(scenario)


def test_a_view_that_nobody_has_agreed_on_costs_nothing(play: Play) -> None:
    async def scenario(donor: Giving) -> None:
        for number in range(100, 110):
            donor.asks(SPARE, ViewId(number, "ab" * 32), LAYERS)
            donor.trainer.following(SPARE, ConfirmLayers(ViewId(number, "ab" * 32), 1, (0, 1)))
        for _ in range(3):
            await donor.commits()
        assert not donor.written and not donor.hashed
        donor.trainer.take_over(NEXT, donor.trainer._state.step, None, None)
        assert not donor.trainer._tools.stores.donor._subscriptions, "of one that is no member"

    play(scenario)


@pytest.mark.parametrize("asker", [name_of(1), HOLDER, NEWCOMER])
def test_who_asks_before_the_donor_hears_of_the_next_view_is_given_what_it_needs(
    play: Play, asker: str
) -> None:
    async def scenario(donor: Giving) -> None:
        place = NEXT.layers_of(asker)
        donor.asks(asker, NEXT.id, place)
        donor.trainer.following(asker, ConfirmLayers(NEXT.id, 1, tuple(place)))
        await donor.boundary()
        assert not donor.line.told
        donor.trainer.view_agreed(NEXT, False)
        await donor.boundary()
        assert [offer.layer for offer in donor.line.heard(LayerOffered)] == list(place)
        assert [said.layer for said in donor.line.heard(StateDigest)] == list(place)

    play(scenario)


def test_who_asks_before_the_donor_hears_of_a_failure_is_given_what_it_needs(play: Play) -> None:
    async def scenario(donor: Giving) -> None:
        place = FAILURE.layers_of(HOLDER)
        donor.asks(HOLDER, FAILURE.id, place, from_takeover=True)
        donor.trainer.view_agreed(FAILURE, False)
        await donor.boundary()
        assert not donor.line.told, "it may yet change what is here"
        donor.trainer.take_over(FAILURE, STEP, None, None)
        await donor.boundary()
        assert [offer.layer for offer in donor.line.heard(LayerOffered)] == list(place)

    play(scenario)


def test_a_guardian_is_given_what_it_guards_and_who_has_taken_over_what_it_lacks(
    play: Play,
) -> None:
    async def scenario(donor: Giving) -> None:
        guardian = name_of(1)
        guarded = sorted(VIEW.guarded_by(guardian) - set(VIEW.layers_of(guardian)))
        assert guarded
        donor.asks(guardian, VIEW.id, guarded, from_takeover=True)
        donor.asks(HOLDER, VIEW.id, VIEW.layers_of(HOLDER))
        await donor.boundary()
        assert {offer.layer for offer in donor.line.heard(LayerOffered)} == {
            *guarded,
            *VIEW.layers_of(HOLDER),
        }

    play(scenario)


def test_who_asked_too_much_of_a_view_to_come_is_told_when_it_comes(play: Play) -> None:
    async def scenario(donor: Giving) -> None:
        asked = donor.asks(HOLDER, NEXT.id, LAYERS)
        donor.trainer.following(HOLDER, ConfirmLayers(NEXT.id, 1, tuple(LAYERS)))
        donor.trainer.view_agreed(NEXT, False)
        await donor.boundary()
        (ended,) = donor.line.told
        assert isinstance(ended, FollowEnded) and ended.number == asked.number
        assert not donor.written and not donor.hashed

    play(scenario)


def test_a_view_that_is_over_is_told_to_be(play: Play) -> None:
    """The view was current a moment ago: the asker is told that it is over, and is not blamed."""

    async def scenario(donor: Giving) -> None:
        waiting = donor.asks(HOLDER, ViewId(4, "another next one"), [4])
        donor.trainer.view_agreed(NEXT, False)
        donor.trainer.take_over(NEXT, STEP, None, None)
        late = donor.asks(HOLDER, VIEW.id, [4])
        donor.trainer.following(HOLDER, ConfirmLayers(VIEW.id, 1, (4,)))
        await donor.boundary()
        assert [m.number for m in donor.line.heard(FollowEnded)] == [waiting.number, late.number]
        assert not donor.written and not donor.hashed

    play(scenario)


def test_a_state_is_written_once_however_often_it_is_asked_for(play: Play) -> None:
    place, present = list(NEXT.layers_of(HOLDER)), list(VIEW.layers_of(HOLDER))
    both = sorted({*place, *present})

    async def scenario(donor: Giving) -> None:
        donor.trainer.view_agreed(NEXT, False)
        for _ in range(4):
            asked = donor.asks(HOLDER, NEXT.id, place)
            donor.asks(HOLDER, VIEW.id, present)
            donor.trainer.following(HOLDER, ConfirmLayers(NEXT.id, asked.number, tuple(place)))
            await donor.boundary()
            donor.trainer.following(HOLDER, FollowDone(NEXT.id, asked.number))
        offers = donor.line.heard(LayerOffered)
        assert len(offers) == 4 * len(place + present) and len({o.blob for o in offers}) == len(
            both
        )
        assert sorted(donor.written) == both and donor.hashed == place
        await donor.commits()
        assert donor.files() == len(present), "those are still fetched"
        donor.asks(HOLDER, NEXT.id, place)
        await donor.boundary()
        assert sorted(donor.written) == sorted([*both, *place]), "it is another one now"

    play(scenario)


def test_a_state_that_has_gone_back_is_written_anew(play: Play) -> None:
    """The state has the same version, but its step was undone and is computed again."""

    async def scenario(donor: Giving) -> None:
        donor.asks(HOLDER, VIEW.id, [4])
        await donor.boundary()
        other = LayerState.genesis(SPEC, 4)
        other.version = STEP
        other.parameters.add_(1.0)
        donor.trainer.states[4] = other
        donor.asks(HOLDER, VIEW.id, [4])
        await donor.boundary()
        first, second = donor.line.heard(LayerOffered)
        assert first.blob != second.blob

    play(scenario)


def test_nothing_is_written_where_a_layer_is_not_here(play: Play) -> None:
    async def scenario(donor: Giving) -> None:
        del donor.trainer.states[5]
        donor.asks(HOLDER, VIEW.id, [4, 5])
        await donor.boundary()
        assert "layer 5 is not held here" in donor.line.heard(FollowEnded)[0].reason
        assert not donor.written

    play(scenario)


@pytest.mark.parametrize("layers", [(0,) * 1_000, (0, 0), (-1,), (1 << 40,)])
def test_no_layer_is_named_twice_and_none_that_there_is_not(
    play: Play, layers: tuple[int, ...]
) -> None:
    """One message of a member made the donor write a million answers, in each of three steps."""

    async def scenario(giving: Giving) -> None:
        of = [ConfirmLayers(view, 1, layers) for view in (VIEW.id, ViewId(9, "ab" * 32))]
        for said in (*of, LayerReceipt(VIEW.id, STEP, layers)):
            with pytest.raises(PeerFault):
                giving.trainer.following(HOLDER, said)
        if layers[0]:
            with pytest.raises(PeerFault):
                giving.asks(HOLDER, ViewId(9, "ab" * 32), layers)
        await giving.boundary()
        assert not giving.line.told

    play(scenario)
